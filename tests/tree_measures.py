"""How large the tree is for a reader: python tests/tree_measures.py prints each measure with its bound."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

ROOT = Path(__file__).parents[1]
_CODE = {".h", ".cpp", ".inl", ".cu", ".cuh"}
_TESTED = ("csrc", "torch_lowcomm", "tests", "benchmarks", "examples")
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
    return sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)


def measures() -> dict[str, float]:
    """Every measure by name."""
    csrc = sources("csrc", _CODE)
    python = [path for folder in _TESTED for path in sources(folder, {".py", *_CODE})]
    return {
        "files to open for collective/all_reduce.cpp": len(to_open(ROOT / "csrc" / "collective" / "all_reduce.cpp")),
        "median lines of a file of csrc": statistics.median(map(lines, csrc)),
        "files of csrc": len(csrc),
        "lines of csrc": sum(map(lines, csrc)),
        "lines of the longest file": max(map(lines, python)),
        "files over 400 lines": sum(lines(path) > 400 for path in python),
        "lines of backend.h": lines(ROOT / "csrc" / "backend" / "backend.h"),
        "lines of README.md": lines(ROOT / "README.md"),
        "lines of benchmarks/README.md": lines(ROOT / "benchmarks" / "README.md"),
    }


if __name__ == "__main__":
    for name, value in measures().items():
        print(f"{name:<48}{value:>8g}")
    for path in sorted((p for f in _TESTED for p in sources(f, {".py", *_CODE})), key=lines)[-8:]:
        print(f"  {lines(path)} {path.relative_to(ROOT)}")
