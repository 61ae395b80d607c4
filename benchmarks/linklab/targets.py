"""The bounds of the standard set."""

from __future__ import annotations

import math
from typing import Any

from report import Gate

from linklab.ops_on_links import OPS
from linklab.rank import CODED, EXACT

_COLUMN = {"of_ideal": "share of the ideal", "of_raw": "share of the raw exchange", "times_gloo": "times gloo"}
# (set, group) -> a column, and its least by op.
LEAST: dict[tuple[str, str], list[tuple[str, dict[str, float]]]] = {
    ("100mbit", CODED): [("of_ideal", dict.fromkeys(OPS, 0.95)), ("times_gloo", {"all_reduce": 7.0})],
    ("1gbit", CODED): [("of_ideal", dict.fromkeys(OPS, 0.95)), ("times_gloo", {"all_reduce": 6.8})],
    ("unshaped", CODED): [("times_gloo", dict.fromkeys(OPS, 3.0))],
    ("4ranks", CODED): [("of_ideal", dict.fromkeys(OPS, 0.93))],
    # Of the least time that the links allow, in which the slow host sends one tensor (csrc/collective/link_shares.h).
    **{(name, EXACT): [("of_ideal", {"all_reduce": 0.95})] for name in ("slow1of3", "slow1of4", "slowup1of3")},
    **{
        (rate, EXACT): [("times_gloo", {"reduce_scatter": 1.8, "all_gather": 1.4, "all_reduce": 0.97})]
        for rate in ("100mbit", "1gbit")
    },
    ("unshaped", EXACT): [("times_gloo", {"reduce_scatter": 1.5, "all_gather": 1.0, "all_reduce": 1.0})],
}
FRAMES = 1.01  # bytes sent / bytes of codes: what frames may cost


def gates(rows: list[dict[str, Any]]) -> list[Gate]:
    """A gate a target, one on the bytes of frames, and one on wrong results."""
    found = []
    for row in rows:
        name = f"{row['set']} {row['op']} {row['group']}"
        for column, least in LEAST.get((row["set"], row["group"]), []):
            if row["op"] in least:
                found.append(Gate(f"{name}: {_COLUMN[column]}", row[column], ">=", least[row["op"]]))
        if row["group"] == CODED:
            count = math.nan if row["counted_bytes"] is None else row["counted_bytes"]
            found.append(Gate(f"{name}: bytes sent / bytes of codes", count / row["needed_bytes"], "<=", FRAMES))
    wrong = sum(row["wrong"] for row in rows)
    return [*found, Gate("results that are not what they must be, all rows and ranks", wrong, "==", 0)]
