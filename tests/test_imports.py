"""The house: imports flow one way, and rooms are small."""

import ast
import importlib
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import lade

PACKAGE = Path(lade.__file__).parent
# From the ground up: a layer imports from itself and from those below it.
LAYERS = [
    "version config drafter announcements errors locks clock stats files native",
    "decoding",
    "memory peers",
    "engines",
    "model",
    "grammar",
    "backends",
    "tuning",
    "hf testing",
    "machine serving recipe",
    "embedded server",
    "bench",
    "cli",
    "__init__ __main__",
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names.split()}
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def test_every_module_has_a_layer_and_none_import_each_other_in_circles():
    assert {layer_of(path) for path in MODULES} <= LEVEL.keys()
    TopologicalSorter(graph()).prepare()  # raises CycleError, which names them


def dotted(path: Path) -> str:
    return ".".join(("lade", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def dependencies(path: Path) -> set[str]:
    """The modules that a file imports from this package, wherever in the file it does so."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "lade":
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in NAMES else node.module for name in inner}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in NAMES}
    return found - {dotted(path)}


NAMES = {dotted(path) for path in MODULES}
FOLDERS = sorted(dotted(path) for path in MODULES if path.name == "__init__.py")


@cache
def graph() -> dict[str, set[str]]:
    """What each module imports from this package."""
    return {dotted(path): dependencies(path) for path in MODULES}


@pytest.mark.parametrize("layer", sorted(LEVEL.keys() - {"__init__", "__main__"}))
def test_a_layer_imports_only_from_itself_and_below(layer):
    for path in (path for path in MODULES if layer_of(path) == layer):
        names = {name.split(".")[1] for name in graph()[dotted(path)] if "." in name}
        above = {name for name in names if LEVEL[name] > LEVEL[layer]}
        assert not above, f"{path.relative_to(PACKAGE)} imports {sorted(above)} from above"


def test_only_the_shell_uses_the_public_names():
    """The top uses them, `lade.generate` and so on."""
    users = {name for name, targets in graph().items() if "lade" in targets}
    assert {name.split(".")[1] for name in users} <= {"cli", "__main__"}


OPEN = "config embedded errors files grammar machine memory recipe server serving stats version"
"""Parts of the library that the shell and the server use as its users may; beside these they take public names."""


@pytest.mark.parametrize("layer", ["server", "cli"])
def test_the_server_and_the_shell_are_clients_of_the_library(layer):
    found: dict[str, set[str]] = {}
    for path in (path for path in MODULES if layer_of(path) == layer):
        for node in ast.walk(ast.parse(path.read_text())):
            module = getattr(node, "module", None) or ""  # of `from ... import ...` alone
            home = module.removeprefix("lade.")
            if home == module or home.split(".")[0] in (layer, *OPEN.split()):
                continue
            for alias in node.names:
                if alias.name not in lade.__all__ or f"{module}.{alias.name}" in NAMES:
                    found.setdefault(home, set()).add(alias.name)
    assert not found, "these are private"


@pytest.mark.parametrize("folder", FOLDERS)
def test_arrows_between_the_parts_of_a_folder_point_one_way(folder):
    """A part is a file or a folder. Two that need each other are one, or lack a third below them."""

    def part(name: str) -> str | None:
        return name.removeprefix(f"{folder}.").partition(".")[0] if name.startswith(f"{folder}.") else None

    arrows: dict[str, set[str]] = {}
    for name, targets in graph().items():
        if (own := part(name)) is not None:
            arrows.setdefault(own, set()).update({part(target) for target in targets} - {None, own})
    TopologicalSorter(arrows).prepare()


ALGORITHM = [path for path in MODULES if layer_of(path) == "decoding"]


FILES_AND_TOKENIZERS = re.compile("open|Path|os|io|pathlib|tempfile|safetensors|json|pickle|memory_file|files")


@pytest.mark.parametrize("path", ALGORITHM, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_algorithm_knows_nothing_of_transformers_files_and_tokenizers(path):
    assert "transformers" not in path.read_text()
    names = {name for node in ast.walk(ast.parse(path.read_text())) for name in named(node)}
    assert not {name for name in names if FILES_AND_TOKENIZERS.fullmatch(name) or "tokenizer" in name.lower()}


def named(node: ast.AST) -> set[str]:
    """Every name that a piece of code uses: variables, attributes, arguments, functions and what it imports."""
    match node:
        case ast.Import() | ast.ImportFrom():
            parts = [*(getattr(node, "module", None) or "").split("."), *(alias.name for alias in node.names)]
            return {name for part in parts for name in part.split(".")}
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.FunctionDef(name=name):
            return {name}
    return set()


def test_only_the_compatibility_module_reads_the_environment():
    readers = {path.name for path in MODULES if "os.environ" in path.read_text() or "getenv" in path.read_text()}
    assert readers == {"legacy_api.py"}


def test_dir_shows_the_public_names_alone_in_order_and_type_checkers_see_the_same():
    assert sorted(lade.__all__) == list(lade.__all__)
    for name in lade.__all__:
        assert getattr(lade, name) is not None
    assert {"enable", "disable", "UnsupportedError"} < set(lade.__all__)
    importlib.import_module("lade.hf.generate")
    assert "hf" in vars(lade) and dir(lade) == list(lade.__all__)
    nodes = [node for node in ast.walk(ast.parse(Path(lade.__file__).read_text())) if isinstance(node, ast.ImportFrom)]
    checked = {alias.name for node in nodes if re.match(r"lade(?!\.version)", node.module) for alias in node.names}
    assert checked == set(lade.__all__) - {"__version__", "bench"}  # the last one is a package of its own
