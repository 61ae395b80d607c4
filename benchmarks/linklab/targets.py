"""The bounds of the standard set."""

from __future__ import annotations

import math
from typing import Any

from report import Gate

from linklab.rank import CODED, CODED_TCP, EXACT, EXACT_TCP

# (set, op) -> (column, least) of the op with 4 bits.
_OPS = ("all_reduce", "all_gather", "reduce_scatter", "exchange")
CODED_LEAST: dict[tuple[str, str], list[tuple[str, float]]] = {
    **{("100mbit", op): [("of_ideal", 0.92)] for op in _OPS},
    **{("1gbit", op): [("of_raw", 0.90)] for op in _OPS},
    **{("unshaped", op): [("times_gloo", 3.0)] for op in _OPS},
    **{("4ranks", op): [("of_ideal", 0.88)] for op in _OPS},
}
CODED_LEAST["100mbit", "all_reduce"].append(("times_gloo", 7.0))
CODED_LEAST["1gbit", "all_reduce"].append(("times_gloo", 6.8))
# (set, op) -> times as fast as gloo with nothing coded.
_SHAPED = {"reduce_scatter": 1.8, "all_gather": 1.4, "all_reduce": 0.97}
EXACT_LEAST = {
    **{("100mbit", op): least for op, least in _SHAPED.items()},
    **{("1gbit", op): least for op, least in _SHAPED.items()},
    ("unshaped", "reduce_scatter"): 1.5,
    ("unshaped", "all_gather"): 1.0,
    ("unshaped", "all_reduce"): 0.95,
}
CODED_TCP_LEAST: dict[tuple[str, str], list[tuple[str, float]]] = {
    **{("100mbit", op): [("of_ideal", 0.95)] for op in _OPS},
    **{("1gbit", op): [("of_ideal", 0.95)] for op in _OPS},
    **{("4ranks", op): [("of_ideal", 0.93)] for op in _OPS},
    ("unshaped", "all_reduce"): [("times_gloo", 3.0)],
    ("unshaped", "exchange"): [("times_gloo", 3.0)],
}
EXACT_TCP_LEAST = {("unshaped", op): 1.0 for op in ("all_gather", "reduce_scatter", "all_reduce")}
_COLUMN = {"of_ideal": "share of the ideal", "of_raw": "share of the raw exchange", "times_gloo": "times gloo fp32"}
FRAMES = 1.01  # bytes sent / bytes of codes: what frames may cost


def gates(rows: list[dict[str, Any]]) -> list[Gate]:
    """A gate a target; of an op that refused it, one that fails with NaN."""
    found = []
    for row in rows:
        key = (row["set"], row["op"])
        name = f"{row['set']} {row['op']} {row['group']}"
        if row["group"] == CODED:
            for column, least in CODED_LEAST[key]:
                found.append(Gate(f"{name}: {_COLUMN[column]}", row.get(column, math.nan), ">=", least))
            found.append(Gate(f"{name}: bytes sent / bytes of codes", _framing(row), "<=", FRAMES))
        elif row["group"] == CODED_TCP:
            for column, least in CODED_TCP_LEAST.get(key, []):
                found.append(Gate(f"{name}: {_COLUMN[column]}", row.get(column, math.nan), ">=", least))
        elif row["group"] == EXACT and key in EXACT_LEAST:
            found.append(Gate(f"{name}: times gloo", row["times_gloo"], ">=", EXACT_LEAST[key]))
        elif row["group"] == EXACT_TCP and key in EXACT_TCP_LEAST:
            found.append(Gate(f"{name}: times gloo", row["times_gloo"], ">=", EXACT_TCP_LEAST[key]))
    wrong = sum(row.get("wrong", 0) for row in rows)
    found.append(Gate("results that are not what they must be, all rows and ranks", wrong, "==", 0))
    return found


def _framing(row: dict[str, Any]) -> float:
    count = row.get("counted_bytes")
    return math.nan if count is None else count / row["needed_bytes"]
