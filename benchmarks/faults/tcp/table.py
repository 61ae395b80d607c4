"""Rows as text: a line each while they run, and the table of benchmarks/results/tcp_faults.md."""

from __future__ import annotations

from collections.abc import Sequence

from faults.tcp.cases import FAULTS, SECRETS, SIZES
from faults.tcp.run import Row

_COLUMNS = [(secret, size) for secret in SECRETS for size in SIZES]


def line(row: Row) -> str:
    """One row."""
    numbers = "  ".join(
        f"{name} {row.seen[key]:.3g}{unit}"
        for key, name, unit in (
            ("pause_s", "pause", " s"),
            ("late_s", "error after", " s"),
            ("making_s", "group in", " s"),
            ("again_s", "the next in", " s"),
            ("made", "made", ""),
            ("slower", "slower", "x"),
            ("worst", "worst", "x"),
            ("before", "before", "x"),
        )
        if key in row.seen
    )
    why = row.reasons[0].splitlines()[0][:300] if row.reasons else ""
    return f"{row.verdict:<4}  {row.case.name:<52}{row.seconds:6.1f} s  {numbers}  {why}".rstrip()


def _cell(rows: Sequence[Row]) -> str:
    """How many hold of those that were run."""
    ran = [row for row in rows if row.verdict != "n/a"]
    if not ran:
        return "n/a" if rows else "-"
    return f"{sum(row.verdict == 'PASS' for row in ran)}/{len(ran)}"


def _most(rows: Sequence[Row]) -> str:
    """The longest that an op waited beyond the fault, or the latest error; next to strangers, ops relative to those without."""
    pauses = [row.seen["pause_s"] for row in rows if "pause_s" in row.seen]
    lates = [row.seen["late_s"] for row in rows if "late_s" in row.seen]
    text = f"pause {max(0.0, *pauses):.2f} s" if pauses else f"error after {max(lates):.2f} s" if lates else "-"
    crowds = [row.seen for row in rows if "slower" in row.seen]
    if crowds:
        median, most = (max(one[key] for one in crowds) for key in ("slower", "worst"))
        text += f", {median:.3f} and {most:.2f} times"
    return text


def table(rows: Sequence[Row]) -> str:
    """A fault a row; how many rows (when and kind) hold in a group of each kind and size, and the worst that was seen."""
    heads = "".join(f"{f'{secret}, {size}':>11}" for secret, size in _COLUMNS)
    lines = [f"# {'fault':<28}{'must':<9}{heads}  the most"]
    for fault in FAULTS:
        mine = [row for row in rows if row.case.fault == fault.name]
        if mine:
            of = [[row for row in mine if (row.case.secret, row.case.size) == column] for column in _COLUMNS]
            cells = "".join(f"{_cell(some):>11}" for some in of)
            lines.append(f"  {fault.name:<28}{fault.outcome:<9}{cells}  {_most(mine)}")
    counts = {word: sum(row.verdict == word for row in rows) for word in ("PASS", "FAIL", "n/a")}
    lines.append(f"# {counts['PASS']} rows hold, {counts['FAIL']} fail, {counts['n/a']} cannot be made here")
    lines += [f"# FAIL  {row.case.name}" for row in rows if row.verdict == "FAIL"]
    return "\n".join(lines)
