"""Figures of the code's structure, from its source alone: `python scripts/house.py [FOLDER]`.

`tests/test_house.py` holds each of them to a bound.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function

CORE = "lade.hf.generate"
"""Its imports, and theirs, are what an ordinary call loads."""
BACKENDS = "lade.backends"
ROLE = "Role"
"""The class through which the core reaches a backend: `Role[P]`, with P a protocol."""
TUNED = ("lade.decoding.drafting.", "lade.decoding.kernels.", "lade.decoding.mtp", "lade.tuning.")
"""Modules whose numbers decide about drafts."""
LAB = "lade_lab"
ROOT = "lade"
"""Has the lab as a lazy name, `lade.bench`."""
TESTS = ("tests/", "lab/tests/", "conftest.py")
"""Where tests and their settings lie, in a checkout."""
PATCHES = {"setattr", "setitem", "delattr", "delitem"}
"""Methods of `MonkeyPatch` that replace something that the test did not make."""
FEWEST_WORDS = 4
"""An entry under `Args:` with fewer, and no shape or name in it, is a fragment: it says nothing by itself."""


@dataclass(frozen=True)
class Source:
    """One file: its module's name, text and syntax tree."""

    name: str
    text: str
    is_package: bool

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed file."""
        return ast.parse(self.text)

    @cached_property
    def _nodes(self) -> list[ast.AST]:
        """All nodes of the tree: each figure looks for others among them."""
        return list(ast.walk(self.tree))

    @property
    def lines(self) -> int:
        """Number of lines, blank ones and comments included."""
        return self.text.count("\n")

    @cached_property
    def code(self) -> int:
        """Number of lines that are neither blank, comment nor docstring."""
        documented: set[int] = set()
        for node in self.nodes(Documented):
            if ast.get_docstring(node, clean=False) is not None:
                first = node.body[0]
                documented |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
        layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
        code: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in layout:
                code |= set(range(token.start[0], token.end[0] + 1))
        return len(code - documented)

    def nodes(self, kind: type) -> Iterator:
        """Yield the syntax nodes of one kind."""
        return (node for node in self._nodes if isinstance(node, kind))

    @property
    def docstrings(self) -> list[str]:
        """Every docstring of the file."""
        return [text for node in self.nodes(Documented) if (text := ast.get_docstring(node))]


class House:
    """All sources of a package, and how they import each other."""

    def __init__(self, package: Path) -> None:
        """Read every Python file below `package`."""
        self.sources: dict[str, Source] = {}
        for path in sorted(package.rglob("*.py")):
            parts = path.relative_to(package.parent).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            self.sources[name] = Source(name, path.read_text(encoding="utf-8"), is_package)

    def imports(self, name: str) -> set[str]:
        """Return the modules of this package that a module imports, wherever in its file."""
        found = set()
        for node in self.sources[name].nodes(ast.Import | ast.ImportFrom):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {each if each in self.sources else node.module for each in inner}
        return (found & self.sources.keys()) - {name}

    def closure(self, name: str) -> set[str]:
        """Return a module and all that it imports, directly or not."""
        seen, left = {name}, [name]
        while left:
            new = self.imports(left.pop()) - seen
            seen |= new
            left += new
        return seen

    def untyped_results(self) -> list[str]:
        """Return what the core gets from a backend without a type: members of the protocols of roles."""
        found = []
        for source in self.sources.values():
            classes = {node.name: node for node in source.nodes(ast.ClassDef)}
            for node in source.nodes(ast.AnnAssign):
                role = node.annotation
                if isinstance(role, ast.Subscript) and ast.unparse(role.value) == ROLE:
                    protocol = classes.get(ast.unparse(role.slice))
                    found += [ast.unparse(role)] if protocol is None else _untyped_members(protocol, classes)
        return found

    def constants(self) -> list[str]:
        """Return the names that have a number, or several, as their value in the modules that decide about drafts."""
        sources = [each for name, each in self.sources.items() if name.startswith(TUNED)]
        assigned = [node for each in sources for node in each.tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
        targets = [getattr(node, "target", None) or node.targets[0] for node in assigned if _is_number(node.value)]
        return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]

    def figures(self) -> dict[str, float]:
        """Return every figure by its name."""
        sources = list(self.sources.values())
        modules = sorted((each for each in sources if not each.is_package), key=lambda each: each.lines)
        code = sum(each.code for each in sources)
        imports = [node for each in sources for node in each.nodes(ast.Import | ast.ImportFrom)]
        functions = sorted(_span(node) for each in sources for node in each.nodes(Function))
        classes = Counter(node.name for each in sources for node in each.nodes(ast.ClassDef))
        docstrings = [text for each in sources for text in each.docstrings]
        entries = [line for text in docstrings for line in _argument_entries(text)]
        core = self.closure(CORE)
        outside = {name for name in core if not name.startswith(BACKENDS)}
        return {
            "files": len(sources),
            "lines": sum(each.lines for each in sources),
            "median lines of a file": modules[len(modules) // 2].lines,
            "files under 40 lines of code": sum(each.code < 40 for each in modules),
            "lines of the largest file": modules[-1].lines,
            "imports, per cent of code": round(100 * sum(map(_span, imports)) / code, 1),
            "lines of a function, p90": functions[int(0.9 * len(functions))],
            "lines of the longest function": functions[-1],
            "files that generate imports": len(core),
            "lines that generate imports": sum(self.sources[name].lines for name in core),
            "imports of backends by the core": sum(
                sum(target.startswith(BACKENDS) for target in self.imports(name)) for name in outside
            ),
            "constants of drafting and tuning": len(self.constants()),
            "results of backends without a type": len(self.untyped_results()),
            "files that import the lab": sum(
                bool(re.search(rf"\b{LAB}\b", each.text)) for name, each in self.sources.items() if name != ROOT
            ),
            "class names used more than once": sum(count > 1 for count in classes.values()),
            "docstrings that begin with What, Whether or Of": sum(
                text.split(maxsplit=1)[0] in {"What", "Whether", "Of"} for text in docstrings
            ),
            "entries of Args that are fragments, per cent": round(
                100 * sum(map(_is_fragment, entries)) / max(len(entries), 1), 1
            ),
        }


def figures_of_tests(checkout: Path) -> dict[str, int]:
    """Return the figures of the tests in a checkout: their mass, and how far they reach into what they test."""
    paths = [path for path in sorted(checkout.rglob("*.py")) if str(path.relative_to(checkout)).startswith(TESTS)]
    sources = [Source(path.stem, path.read_text(encoding="utf-8"), is_package=False) for path in paths]
    return {
        "lines of tests": sum(each.lines for each in sources),
        "private attributes in tests": sum(map(_is_private, _nodes(sources, ast.Attribute))),
        "patches in tests": sum(map(_is_patch, _nodes(sources, ast.Call))),
    }


def _nodes(sources: list[Source], kind: type) -> Iterator:
    return (node for each in sources for node in each.nodes(kind))


def _is_private(node: ast.Attribute) -> bool:
    """Whether it reads or writes a private attribute of something else than the object whose method it stands in."""
    inside = isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr.startswith("_") and not node.attr.startswith("__") and not inside


def _is_patch(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and node.func.attr in PATCHES


def _is_number(value: ast.AST | None) -> bool:
    """Whether a value is made of numbers alone: a literal, a tuple, or arithmetic."""
    parts = [] if value is None else list(ast.walk(value))
    numbers = [part.value for part in parts if isinstance(part, ast.Constant)]
    return (
        bool(numbers)
        and {int, float} >= set(map(type, numbers))
        and not any(isinstance(part, ast.Name | ast.Call) for part in parts)
    )


def _span(node: ast.AST) -> int:
    return node.end_lineno - node.lineno + 1


def _untyped_members(protocol: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> list[str]:
    """Return the members of a protocol, and of those it derives from, that may give anything."""
    found = []
    for base in map(ast.unparse, protocol.bases):
        found += _untyped_members(classes[base], classes) if base in classes else []
    for member in protocol.body:
        given = getattr(member, "returns", None) or getattr(member, "annotation", None)
        parts = [] if given is None else ast.unparse(given).split(" | ")
        if isinstance(member, Function | ast.AnnAssign) and (not parts or {"Any", "object"} & set(parts)):
            found.append(f"{protocol.name}.{getattr(member, 'name', '')}")
    return found


def _argument_entries(docstring: str) -> list[str]:
    """Return the lines that begin an entry under `Args:`."""
    _, found, rest = docstring.partition("\nArgs:\n")
    if not found:
        return []
    section = re.split(r"\n(?=\S)", rest, maxsplit=1)[0]
    return [line for line in section.splitlines() if re.match(r"    [\w*]", line)]


def _is_fragment(entry: str) -> bool:
    description = entry.partition(": ")[2]
    return "`" not in description and len(description.split()) < FEWEST_WORDS


def main() -> None:
    """Print the figures of a package, `lade` with its tests unless another folder is named."""
    package = Path(sys.argv[1] if len(sys.argv) > 1 else "lade").resolve()
    figures = House(package).figures()
    if len(sys.argv) == 1:
        figures |= figures_of_tests(package.parent)
    for name, value in figures.items():
        print(f"{value:>10g}  {name}")


if __name__ == "__main__":
    main()
