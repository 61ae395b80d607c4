"""Rows as text: a line each while they run, and the table of benchmarks/results/faults.md."""

from __future__ import annotations

from collections.abc import Sequence

from faults.cases import FAULTS, KINDS, OPS
from faults.run import Row


def line(row: Row) -> str:
    """One row of the matrix."""
    case = row.case
    late = "" if row.late_s is None else f"{row.late_s:+6.2f} s"
    why = row.reasons[0].splitlines()[0][:200] if row.reasons else ""
    return (
        f"{row.verdict:<4}  {case.op:<14} {case.kind:<10} {case.fault:<13} {case.when:<6} {case.size} ranks "
        f"{row.seconds:5.1f} s {late:>9}  {why}"
    ).rstrip()


def cell(rows: Sequence[Row]) -> str:
    """Rows of one op, kind and fault: how many hold of those that were run."""
    if not rows:
        return ""
    if all(row.verdict == "n/a" for row in rows):
        return "n/a"
    held = sum(row.verdict == "PASS" for row in rows)
    return f"{held}/{len(rows)}" if held == len(rows) else f"**{held}/{len(rows)}**"


def table(rows: Sequence[Row]) -> str:
    """Markdown: an op and kind a row, a fault a column, how many of its (when × ranks) rows hold in a cell."""
    lines = ["| op | | " + " | ".join(FAULTS) + " |", "| --- | --- |" + " --- |" * len(FAULTS)]
    for op in OPS:
        for kind in KINDS:
            cells = [
                cell([row for row in rows if (row.case.op, row.case.kind, row.case.fault) == (op, kind, fault)])
                for fault in FAULTS
            ]
            if any(cells):
                lines.append(f"| {op} | {kind} | " + " | ".join(cells) + " |")
    counts = {word: sum(row.verdict == word for row in rows) for word in ("PASS", "FAIL", "n/a")}
    lines.append("")
    lines.append(f"{counts['PASS']} rows hold, {counts['FAIL']} fail, {counts['n/a']} cannot exist.")
    return "\n".join(lines)
