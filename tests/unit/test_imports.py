"""What a setting names by a dotted path is found, or said why not, whatever the user's module does when imported."""

import sys

import pytest

from trainer.common.imports import import_named


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a module of the user's into a folder on the path; it is forgotten after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(name: str, text: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return str(path)

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_functions_classes_and_classes_in_classes_are_found(write):
    write("mine_a.py", "def f(): return 1\nclass Outer:\n    class Inner: pass\n")
    write("mine_b/__init__.py", "")
    write("mine_b/part.py", "def g(): return 2\n")
    assert import_named("mine_a.f", setting="reward")() == 1
    assert import_named("mine_a.Outer.Inner", setting="reward").__qualname__ == "Outer.Inner"
    assert import_named("mine_b.part.g", setting="reward")() == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(:\n    pass\n", r"SyntaxError: invalid syntax \({path}, line 1\)"),
        ("import os\nf = undefined\n", r"NameError: name 'undefined' is not defined \({path}, line 2\)"),
        ("\n\nimport not_installed\n", r"ModuleNotFoundError: No module named 'not_installed' \({path}, line 3\)"),
        ("from os import nothing\n", r"ImportError: cannot import name 'nothing' from 'os' .*\({path}, line 1\)"),
        ("def g():\n    raise KeyError('a')\ng()\n", r"KeyError: 'a' \({path}, line 2\)"),
        ("import sys\nsys.exit(3)\n", r"SystemExit: 3 \({path}, line 2\)"),
        ("f = 1 / 0\n", r"ZeroDivisionError: division by zero \({path}, line 1\)"),
    ],
)
@pytest.mark.parametrize("package", [False, True])
def test_a_module_that_fails_is_named_with_the_line(text, message, package, write):
    if package:
        write("mine_c/__init__.py", "")
    path, name = (write("mine_c/d.py", text), "mine_c.d.f") if package else (write("mine_d.py", text), "mine_d.f")
    with pytest.raises(ValueError, match=f"^reward={name} cannot be imported: {message.format(path=path)}$"):
        import_named(name, setting="reward")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.f", "No module named 'nowhere'. Install the package, or put its folder on PYTHONPATH"),
        ("nowhere.a.f", "No module named 'nowhere'. Install the package, or put its folder on PYTHONPATH"),
        ("os.nothing", "module 'os' has no attribute 'nothing'"),
        ("os.nothing.f", "module 'os' has no attribute 'nothing'"),
        ("f", "it must be a dotted path like package.module.name"),
        ("os..f", "it must be a dotted path like package.module.name"),
        ("os.path f", "it must be a dotted path like package.module.name"),
    ],
)
def test_a_name_that_is_not_there(name, message):
    with pytest.raises(ValueError, match="cannot be imported") as caught:
        import_named(name, setting="task._target_")
    assert str(caught.value) == f"task._target_={name} cannot be imported: {message}"
