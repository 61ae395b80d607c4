"""How large the tree is for a reader: python tests/tree_measures.py prints each measure and its bound.

`tests/python/package/test_tree_measures.py` holds the tree to `BOUNDS`.
"""

from __future__ import annotations

import ast
import graphlib
import re
import statistics
from pathlib import Path

ROOT = Path(__file__).parents[1]
_CODE = {".h", ".cpp", ".inl", ".cu", ".cuh"}
_TESTED = ("csrc", "torch_lowcomm", "tests", "benchmarks", "examples")
# The least and the most of each measure.
BOUNDS = {
    "files to open for collective/all_reduce.cpp": (1, 18),
    "median lines of a file of csrc": (110, 200),
    "files of csrc": (1, 350),
    "lines of csrc": (1, 45_000),
    "lines of torch_lowcomm": (1, 17_500),
    "lines of tests": (1, 57_000),
    "lines of benchmark programs": (1, 15_000),
    "most declarations of a class of csrc": (1, 45),
    "lines of the longest Python class": (1, 250),
    "circles of Python imports": (0, 0),
    "lines of the longest file": (1, 400),
    "files over 400 lines": (0, 0),
    "lines of backend.h": (1, 160),
    "lines of README.md": (1, 150),
    "lines of benchmarks/README.md": (1, 250),
    "lines of docs/diloco.md": (1, 180),
    "longest line of docs (no code, no table)": (1, 140),
    "comments of csrc in private words": (0, 50),
    "comments of csrc that begin with What": (0, 10),
    "lines of the JSONs in benchmarks/results": (1, 12_000),
    "MB of benchmarks/results": (0, 4),
}
# Comments that name no subject ("Of a receive: the sender"), or nobody in a null's place.
_PRIVATE = re.compile(
    r"^(Of\b|By\b|As [a-z]+\(|The same (of|with|for|where)|Or |In place of)|\b(nobody|somebody|whoever|is none|are none)\b"
)
_COMMENT = re.compile(r"(?:^[ \t]*//.*\n)+", re.MULTILINE)
_CODE_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_BODY = re.compile(r"\b(?:class|struct)\s+([A-Za-z_]\w*(?:::\w+)*)\s*(?:final\s*)?(?::[^:{;][^{;]*)?\{")
_NO_CODE = re.compile(r'//[^\n]*|"(?:\\.|[^"\\])*"')
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def lines(path: Path) -> int:
    """Lines of a file."""
    return len(path.read_text().splitlines())


def to_open(path: Path) -> set[Path]:
    """A source file and all of csrc that it includes, directly or not: what a reader may have to open."""
    seen: set[Path] = set()
    todo = [path]
    while todo:
        here = todo.pop()
        if here not in seen:
            seen.add(here)
            todo += [found for name in _INCLUDE.findall(here.read_text()) if (found := ROOT / "csrc" / name).exists()]
    return seen


def sources(folder: str, suffixes: set[str]) -> list[Path]:
    """All files of a folder that have one of these suffixes."""
    found = (path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)
    return sorted(path for path in found if path.name != "_build_info.py")  # which a build writes


def comments(path: Path) -> list[str]:
    """The texts of a source file's comments: lines that follow each other are one."""
    found = _COMMENT.findall(path.read_text())
    return [" ".join(line.strip().removeprefix("//").strip() for line in block.splitlines()) for block in found]


def declarations(path: Path) -> list[int]:
    """Of each class of a source file, how many members and types it declares."""
    text = _NO_CODE.sub("", path.read_text())
    return [_members(text, found.end()) for found in _BODY.finditer(text)]


def _members(text: str, at: int) -> int:
    """Statements and bodies of functions between an opening brace, behind which `at` is, and its closing one."""
    depth, count, statement = 1, 0, ""
    while depth:
        here = text[at]
        depth += (here == "{") - (here == "}")
        if here == "}" and depth == 1 and not re.match(r"\s*[;,]", text[at + 1 :]):
            here = ";"  # a function's body; that of a type or an initial value ends with a semicolon
        if depth == 1 and here == ";":
            count += bool(re.sub(r"(public|private|protected)\s*:", "", statement).strip())
            statement = ""
        elif depth == 1:
            statement += here
        at += 1
    return count


def longest_class(path: Path) -> int:
    """Lines of the longest class of a Python file."""
    tree = ast.parse(path.read_text())
    return max((n.end_lineno - n.lineno + 1 for n in ast.walk(tree) if isinstance(n, ast.ClassDef)), default=0)


def circle() -> list[str]:
    """Modules of torch_lowcomm that import each other in a circle, for type checks too; empty: there are none."""
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sources("torch_lowcomm", {".py"})
    }
    imports: dict[str, set[str]] = {name: set() for name in paths}
    for name, path in paths.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                found = {f"{node.module}.{alias.name}" for alias in node.names} & paths.keys()
                imports[name] |= found or {node.module} & paths.keys() - {
                    "torch_lowcomm"
                }  # which has _C, no module here
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        modules: list[str] = error.args[1]
        return modules
    return []


def prose() -> list[str]:
    """The lines of docs/*.md and CONTRIBUTING.md that are neither code nor rows of tables."""
    texts = (path.read_text() for path in (*(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md"))
    return [line for text in texts for line in _CODE_BLOCK.sub("", text).splitlines() if not line.startswith("|")]


def measures() -> dict[str, float]:
    """Every measure by name."""
    csrc = sources("csrc", _CODE)
    said = [text for path in csrc for text in comments(path)]
    everywhere = {folder: sources(folder, {".py", *_CODE}) for folder in _TESTED}
    python = [path for paths in everywhere.values() for path in paths]
    return {
        "files to open for collective/all_reduce.cpp": len(to_open(ROOT / "csrc" / "collective" / "all_reduce.cpp")),
        "median lines of a file of csrc": statistics.median(map(lines, csrc)),
        "files of csrc": len(csrc),
        "lines of csrc": sum(map(lines, csrc)),
        "lines of torch_lowcomm": sum(map(lines, everywhere["torch_lowcomm"])),
        "lines of tests": sum(map(lines, everywhere["tests"])),
        "lines of benchmark programs": sum(map(lines, everywhere["benchmarks"])),
        "most declarations of a class of csrc": max(count for path in csrc for count in declarations(path)),
        "lines of the longest Python class": max(map(longest_class, everywhere["torch_lowcomm"])),
        "circles of Python imports": len(circle()) > 0,
        "lines of the longest file": max(map(lines, python)),
        "files over 400 lines": sum(lines(path) > 400 for path in python),
        "lines of backend.h": lines(ROOT / "csrc" / "backend" / "backend.h"),
        "lines of README.md": lines(ROOT / "README.md"),
        "lines of benchmarks/README.md": lines(ROOT / "benchmarks" / "README.md"),
        "lines of docs/diloco.md": lines(ROOT / "docs" / "diloco.md"),
        "longest line of docs (no code, no table)": max(map(len, prose())),
        "comments of csrc in private words": sum(bool(_PRIVATE.search(text)) for text in said),
        "comments of csrc that begin with What": sum(text.startswith("What ") for text in said),
        "lines of the JSONs in benchmarks/results": sum(map(lines, sources("benchmarks/results", {".json"}))),
        "MB of benchmarks/results": sum(path.stat().st_size for path in (ROOT / "benchmarks" / "results").iterdir())
        / 1e6,
    }


if __name__ == "__main__":
    print(f"{'measure':<48}{'is':>8}{'bound':>12}")
    for name, value in measures().items():
        print(f"{name:<48}{value:>8g}{'{}...{}'.format(*BOUNDS[name]):>12}")
    for path in sorted((p for f in _TESTED for p in sources(f, {".py", *_CODE})), key=lines)[-8:]:
        print(f"  {lines(path)} {path.relative_to(ROOT)}")
