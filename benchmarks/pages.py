"""Whether a page under results/ has the figures of the results that it names; and those, as a page shows them.

python benchmarks/pages.py              # exit status 1 where a page has others, with the line
python benchmarks/pages.py RESULT...    # tables and gates of results/RESULT.json, to be put on a page

This is of pages with tables that a program rendered and kept in its JSON; figures.py checks the blocks of all others. Such a page
names its results by their files, `qsdp_levels.json`. A row of its tables is one that such a result keeps in its `tables`, to the
letter; or, of results without `tables`, has figures that are all numbers of theirs, as figures.py finds them. A line of PASS or
FAIL is a gate of such a result.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import figures
import report
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


def shown(name: str) -> str:
    """A result's tables and gates as a page has them."""
    result = figures.load(name)
    parts = [
        "\n".join([f"{table.title[0].upper()}{table.title[1:]}:", "", *table.markdown()])
        for table in tables.of_json(result)
    ]
    gates = [report.Gate(gate["name"], gate["value"], gate["op"], gate["bound"]).line() for gate in result["gates"]]
    return "\n\n".join([*parts, "\n".join(["```", *gates, "```"])])


def main(names: list[str]) -> int:
    """Shows the results of these names; without one checks all pages. The exit status."""
    if names:
        print("\n\n".join(shown(name) for name in names))
        return 0
    wrong = [said for page in of_tables() for said in wrong_in_page(page)]
    print("\n".join(wrong or ["all figures are the results'"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
