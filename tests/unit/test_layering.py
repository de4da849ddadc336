"""Imports run one way; who may know omegaconf, torch_memory_saver and the environment; what the parent imports."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# The folders of trainer/, each with its modules: a module imports from its own folder and from those above it here.
# Entry points, the __main__ modules of folders, may import everything.
FOLDERS = [
    "common",
    "tasks",
    "algo",
    "config",
    "report",
    "models",
    "megatron",
    "data",
    "plan",
    "memory",
    "roles",
    "rollout",
    "training",
    "measure",
    "checkpoint",
    "loop",
    "worker",
    "command",
    "bench",
    "__main__",
]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("trainer", "patches")
    for path in sorted((ROOT / package).rglob("*.py"))
}


def nodes(module: str) -> Iterator[ast.AST]:
    """Every node of the module's source except what stands under ``if TYPE_CHECKING``."""
    waiting: list[ast.AST] = [ast.parse(MODULES[module].read_text())]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        waiting.extend(ast.iter_child_nodes(node))


def imports(module: str) -> set[str]:
    """Full names of all that a module imports, also inside functions."""
    names = set()
    for node in nodes(module):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names.add(full if full in MODULES else node.module or "")
    return names


def imports_at_top(module: str) -> set[str]:
    """Full names of what is imported with the module itself."""
    found = [node for node in ast.parse(MODULES[module].read_text()).body if isinstance(node, ast.ImportFrom)]
    return {
        name for node in found for alias in node.names for name in (node.module or "", f"{node.module}.{alias.name}")
    }


def level_of(module: str) -> int:
    """Position of a module's folder; ``patches`` comes first, and packages without a folder of their own with it."""
    package, _, rest = module.partition(".")
    if package == "patches" or not rest:
        return -1
    return FOLDERS.index("__main__" if rest.endswith("__main__") else rest.partition(".")[0])


def importers_of(library: str) -> set[str]:
    return {module for module in MODULES if any(name.split(".")[0] == library for name in imports(module))}


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"trainer"}))
def test_imports_run_one_way(module):
    own = [name for name in imports(module) if name.split(".")[0] in ("trainer", "patches")]
    wrong = [name for name in own if level_of(name) > level_of(module)]
    assert wrong == [], f"{module} imports from a later folder"


def test_every_folder_says_what_may_live_in_it():
    folders = {path.name for path in (ROOT / "trainer").iterdir() if (path / "__init__.py").exists()}
    modules = {path.stem for path in (ROOT / "trainer").glob("*.py")} - {"__init__"}
    assert folders | modules == set(FOLDERS)
    for folder in folders:
        assert ast.get_docstring(ast.parse((ROOT / "trainer" / folder / "__init__.py").read_text()))


def test_no_module_is_long():
    assert {module: n for module, path in MODULES.items() if (n := len(path.read_text().splitlines())) > 300} == {}


def test_only_roles_know_megatrons_side_of_a_role():
    private = re.compile(r"(?<!self)\.model\.(chunks|optimizer|state)\b|\._weights\.backuper")
    elsewhere = [module for module in MODULES if not module.startswith(("trainer.roles", "trainer.config"))]
    assert [module for module in elsewhere if private.search(MODULES[module].read_text())] == []


@pytest.mark.parametrize("package", ["trainer.tasks", "trainer.algo"])
def test_leaf_packages_know_only_themselves_and_what_is_common(package):
    for module in MODULES:
        if module.startswith(package):
            known = (package, "trainer.common")
            assert all(name.startswith(known) for name in imports(module) if name.split(".")[0] == "trainer")


def test_algo_is_pure_tensor_functions():
    libraries = {"__future__", "abc", "collections", "dataclasses", "math", "torch", "trainer", "typing"}
    for module in MODULES:
        if module.startswith("trainer.algo"):
            assert {name.split(".")[0] for name in imports(module)} - {"triton"} <= libraries


def test_triton_kernels_are_in_modules_of_their_own():
    """Which are imported where a GPU is to run them."""
    of_kernels = {module for module in MODULES if module.endswith("_triton")}
    assert importers_of("triton") == of_kernels != set()
    importers = [(module, name) for module in MODULES for name in imports_at_top(module) if name in of_kernels]
    assert importers == []


def test_who_imports_what():
    mains = {"trainer.__main__", "trainer.command.hydra_job", "trainer.plan.__main__"} | {
        module for module in MODULES if module.startswith("trainer.bench.")
    }
    assert importers_of("omegaconf") - mains == {"trainer.config.compose"}
    of_hydra = {f"trainer.command.{name}" for name in ("exits", "jobs", "sweep_processes", "sweep_start")}
    of_hydra |= {f"trainer.config.{name}" for name in ("compose", "overrides", "pieces")}
    assert importers_of("hydra") - mains == of_hydra
    allowed = {"trainer.command.launch_environment"}
    users = {
        m
        for m in importers_of("torch_memory_saver")
        if not m.startswith(("patches.", "trainer.memory.", "trainer.bench."))
    }
    assert users == allowed
    assert not [
        module
        for module in MODULES
        if module.startswith("patches") and any(name.startswith("trainer") for name in imports(module))
    ]


WRITERS = {f"os.environ.{name}" for name in ("update", "setdefault", "pop", "clear")} | {"os.putenv", "os.unsetenv"}


def writes_environment(node: ast.AST) -> bool:
    """``os.environ[...] = ``, ``del os.environ[...]``, ``os.environ.update`` and the like, ``os.putenv``."""
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return ast.unparse(node.value) == "os.environ"
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in WRITERS
    return isinstance(node, ast.AugAssign) and ast.unparse(node.target) == "os.environ"


def test_the_environment_is_written_in_one_place():
    writers = {module for module in MODULES if any(writes_environment(node) for node in nodes(module))}
    assert writers - {"patches.probe"} == {"trainer.command.process_state"}  # the probe's are in processes of its own


def test_the_parent_neither_imports_megatron_nor_touches_a_device():
    program = (
        "import sys, trainer.__main__, trainer.plan.__main__, torch\n"
        "from tests.helpers.composing import config_of\n"
        "from trainer.plan.fit import check_fits\n"
        "from trainer.rollout.engines import planned_bytes\n"
        "from trainer.config.pieces import make_task\n"
        "from trainer.tasks.tokenizer import vocab_size_of\n"
        "entries = vocab_size_of(None, task=make_task(config_of()), vocab_size=320)\n"
        "engine = planned_bytes(config_of(), vocab_size=entries)\n"
        "check_fits(config_of(), vocab_size=entries, engine=engine)\n"
        "print([name for name in ('megatron', 'transformers', 'matplotlib') if name in sys.modules], "
        "torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[] False\n", done.stderr


def test_one_function_makes_every_console():
    """So that no text of the user's is taken for markup."""
    makers = {
        module
        for module in MODULES
        for node in nodes(module)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("Console", "from_markup")
    }
    assert makers == {"trainer.common.terminal"}


def test_test_modules_import_no_other_test_modules():
    """What several of them share is in tests/helpers."""
    imported = {
        (path.name, node.module)
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "tests"
    }
    assert imported
    assert {(name, module) for name, module in imported if not module.startswith("tests.helpers")} == set()
