"""The program `faults`: every op with every fault."""

from __future__ import annotations

from collections.abc import Sequence

from faults import rows
from faults.cases import FAULTS, KINDS, OPS, Case, matrix
from faults.rows import Row
from faults.run import Runner

COLUMNS = "op,kind,fault,when,ranks"


def chosen(patterns: Sequence[str]) -> list[Case]:
    """Rows of the matrix that match one of the patterns, in its order. ValueError when a pattern matches none."""
    return rows.chosen(patterns, list(matrix()), COLUMNS)


def cell(of_cell: Sequence[Row]) -> str:
    """Rows of one op, kind and fault: how many hold of those that were run."""
    if not of_cell:
        return ""
    if all(row.verdict == "n/a" for row in of_cell):
        return "n/a"
    held = f"{sum(row.verdict == 'PASS' for row in of_cell)}/{len(of_cell)}"
    return held if all(row.verdict == "PASS" for row in of_cell) else f"**{held}**"


def table(found: Sequence[Row]) -> str:
    """Markdown: an op and kind a row, a fault a column, how many of its (when × ranks) rows hold in a cell."""
    lines = ["| op | | " + " | ".join(FAULTS) + " |", "| --- | --- |" + " --- |" * len(FAULTS)]
    for op in OPS:
        for kind in KINDS:
            mine = [row for row in found if (row.case.op, row.case.kind) == (op, kind)]
            cells = [cell([row for row in mine if row.case.fault == fault]) for fault in FAULTS]
            if any(cells):
                lines.append(f"| {op} | {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Runs it."""
    return rows.main("faults", COLUMNS, Runner, table, matrix=matrix)
