"""Checks the figures of README.md and of the pages under results/ against the results.

python benchmarks pages              # exit status 1 if a page has another figure, with the line

A page has a program's output in one of two forms. A block is what the program printed, and the program fills it
(result_pages.py); figures.py checks it. A table is rendered from the `tables` in the result's JSON and is checked here. A page
with tables names its results by their files, for example `fsdp_kjv.json`. A row of its tables is a row of such a result, to
the letter; or, for a result without `tables`, all of its figures are numbers of that result. A line of PASS or FAIL is a gate
of such a result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import figures
import tables


def named(page: Path, text: str) -> list[str]:
    """The results whose files a page names."""
    names = dict.fromkeys(re.findall(r"(\w+)\.json", text))
    return [name for name in names if (page.parent / f"{name}.json").exists()]


def of_tables() -> list[Path]:
    """The pages that name a result with tables."""
    found = []
    for page in sorted(figures.RESULTS.glob("*.md")):
        if any("tables" in figures.load(name) for name in named(page, page.read_text())):
            found.append(page)
    return found


def wrong_in_page(page: Path, text: str | None = None) -> Iterator[str]:
    """Rows and gates that no result has which the page names; of the page's `text`, or of another in its place."""
    text = page.read_text() if text is None else text
    names = named(page, text)
    if not names:
        yield f"{page.name}: expected the name of a result's file, got none"
    results = [json.loads((page.parent / f"{name}.json").read_text()) for name in names]
    rows = {line for result in results for table in tables.of_json(result) for line in table.markdown()}
    numbers = sorted({n for result in results if "tables" not in result for n in figures.numbers_in(result)})
    gates = {figures.gate(gate) for result in results for gate in result["gates"]}
    for line in text.splitlines():
        if line.startswith("|") and line not in rows and (strange := figures.untraced([line], numbers)):
            yield f"{page.name}: expected a row of {', '.join(names)}, got {line!r} with {strange[:5]}"
    for found in figures.gates_in(text) - gates:
        yield f"{page.name}: expected a gate of {', '.join(names)}, got {found}"


def wrong() -> Iterator[str]:
    """All rows, figures and gates of README.md and of the results' pages that are not the results'."""
    readme = (figures.ROOT / "README.md").read_text()
    yield from figures.wrong_in_readme(readme)
    for row in figures.unmeasured(readme):
        yield f"README.md: expected a result for the figures of {row!r}, got none"
    for page in sorted(figures.RESULTS.glob("*.md")):
        yield from figures.wrong_in_page(page.name, page.read_text())
    for page in of_tables():
        yield from wrong_in_page(page)


def main() -> int:
    """Checks all pages; returns the exit status."""
    found = list(wrong())
    print("\n".join(found or ["all figures are the results'"]))
    return 1 if found else 0
