"""docs/public.md and the code agree; links between the documents lead somewhere."""

import dataclasses
import pkgutil
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "public.md").read_text()
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def section(title: str) -> list[tuple[str, str]]:
    """The table rows of a section: (first cell without ticks, second cell)."""
    text = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \| (.*) \|$", text, re.MULTILINE)


def members_of(thing: type) -> set[str]:
    fields = {field.name for field in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else set()
    fields |= set(getattr(thing, "_fields", ()))
    public = {name for base in thing.__mro__[:-1] for name in vars(base) if not name.startswith("_")}
    return fields | {name for name in public if name not in ("count", "index")}  # a tuple's


@pytest.mark.parametrize(("name", "members"), section("To extend or to call"))
def test_what_may_be_relied_on_is_there_and_nothing_else_is(name, members):
    thing = pkgutil.resolve_name(name)
    if isinstance(thing, type):
        assert set(re.findall(r"`(\w+)`", members)) == members_of(thing)
    else:
        assert callable(thing)


def test_every_command_is_a_module():
    modules = [command.removeprefix("python -m ") for command, _ in section("Commands")]
    assert len(modules) >= 7
    for module in modules:
        spec = find_spec(module)
        assert spec is not None, module
        assert spec.submodule_search_locations is None or find_spec(f"{module}.__main__"), module


def test_every_target_in_conf_is_on_the_page_and_can_be_imported():
    listed = {name for name, _ in section("Targets")}
    used = {
        target
        for path in (ROOT / "conf").rglob("*.yaml")
        for target in re.findall(r"_target_: *((?:trainer|patches)[\w.]+)", path.read_text())
    }
    assert used == listed
    for name in listed:
        assert isinstance(pkgutil.resolve_name(name), type)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []
