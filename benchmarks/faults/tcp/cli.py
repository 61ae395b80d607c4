"""The program `tcp_faults`: every fault of connections, plain and with a secret."""

from __future__ import annotations

from collections.abc import Sequence

from faults import rows
from faults.rows import Row
from faults.tcp.cases import FAULTS, SECRETS, SIZES, Case, matrix, quick
from faults.tcp.run import Runner

COLUMNS = "fault,when,kind,secret,ranks"
_GROUPS = [(secret, size) for secret in SECRETS for size in SIZES]


def chosen(patterns: Sequence[str], among: Sequence[Case]) -> list[Case]:
    """Rows that match one of the patterns, in their order. ValueError when a pattern matches none."""
    return rows.chosen(patterns, among, COLUMNS)


def _cell(found: Sequence[Row]) -> str:
    """How many hold of those that were run."""
    ran = [row for row in found if row.verdict != "n/a"]
    if not ran:
        return "n/a" if found else "-"
    return f"{sum(row.verdict == 'PASS' for row in ran)}/{len(ran)}"


def _most(found: Sequence[Row]) -> str:
    """The longest that an op waited beyond the fault, or the latest error; next to strangers, ops relative to those without."""
    pauses, lates = ([row.seen[key] for row in found if key in row.seen] for key in ("pause_s", "late_s"))
    text = f"pause {max(0.0, *pauses):.2f} s" if pauses else f"error after {max(lates):.2f} s" if lates else "-"
    if crowds := [row.seen for row in found if "slower" in row.seen]:
        median, most = (max(one[key] for one in crowds) for key in ("slower", "worst"))
        text += f", {median:.3f} and {most:.2f} times"
    return text


def table(found: Sequence[Row]) -> str:
    """A fault a row; how many rows (when and kind) hold in a group of each kind and size, and the worst that was seen."""
    heads = "".join(f"{f'{secret}, {size}':>11}" for secret, size in _GROUPS)
    lines = [f"# {'fault':<28}{'must':<9}{heads}  the most"]
    for fault in FAULTS:
        if mine := [row for row in found if row.case.fault == fault.name]:
            of = [[row for row in mine if (row.case.secret, row.case.size) == group] for group in _GROUPS]
            cells = "".join(f"{_cell(some):>11}" for some in of)
            lines.append(f"  {fault.name:<28}{fault.outcome:<9}{cells}  {_most(mine)}")
    return "\n".join([*lines, *(f"# FAIL  {row.case.name}" for row in found if row.verdict == "FAIL")])


def main() -> int:
    """Runs it."""
    return rows.main("tcp_faults", COLUMNS, Runner, table, matrix=matrix, quick=quick)
