"""The claims about the rows."""

from __future__ import annotations

from report import Gate

from diloco import memory
from diloco.cases import PAIRS
from diloco.measure import Row

SHARE = 0.93
LOCAL = 0.03  # of 100 inner steps
BYTES = 1.01  # sent by format, for frame headers
FEWER_BYTES, LESS_WAITING, LOSS = 8.0, 1 / 3, 1.01  # against torchft
MEMORY = 0.05  # off the formula


def of_link(rows: list[Row]) -> list[Gate]:
    """Of one link's rows."""
    rate, ours = rows[0].rate, [row for row in rows if row.payload]
    gates = [
        Gate(f"{rate}: {row.name}, share of the speed without communication", row.share, ">=", SHARE)
        for row in ours
        if row.name.startswith("continue") and row.fits
    ]
    for row in ours:
        share, by_format = row.local_share, row.wire / row.payload
        gates.append(Gate(f"{rate}: {row.name}, outer step's own work / 100 inner steps", share, "<=", LOCAL))
        gates.append(Gate(f"{rate}: {row.name}, bytes by the library / by the format", by_format, "<=", BYTES))
    return gates + [gate for pair in PAIRS for gate in _against(rows, *pair)]


def _against(rows: list[Row], mine: str, theirs: str) -> list[Gate]:
    """A case of ours next to torchft's; none where one of them was left out."""
    named = {row.name: row for row in rows}
    if mine not in named or theirs not in named:
        return []
    a, b = named[mine], named[theirs]
    what = f"{a.rate}: {theirs}"
    return [
        Gate(f"{what}'s bytes / {mine}'s, on the interface", b.sent / a.sent, ">=", FEWER_BYTES),
        Gate(f"{what}'s waiting, of which {mine}", a.waited_s / b.waited_s, "<=", LESS_WAITING),
        Gate(f"{what}'s loss, {mine}'s by it", a.loss / b.loss, "<=", LOSS),
    ]


def of_memory(rows: list[memory.Row]) -> list[Gate]:
    """Of the outer state."""
    return [
        Gate(f"memory: {row.name}, resident by the formula, off by", abs(row.resident / row.formula - 1), "<=", MEMORY)
        for row in rows
    ]
