"""What lowcomm's transport makes of links: long ones, lossy ones, full and busy ones, and none at all.

    python benchmarks tcp_links [--quick] [--only SET …] [--json FILE]        # as root

benchmarks/results/tcp_links.md has the definitions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import report

from linklab.ops_on_links import COLUMNS, MIB, OPS, Set, measure
from linklab.rank import CODED, EXACT, GLOO

SUMS = ("all_reduce", "all_gather", "reduce_scatter")
SIZES = (1 << 10, 1 << 14, 1 << 16, MIB, 4 * MIB, 16 * MIB, 64 * MIB)  # 4 KiB to 64 MiB
BOTH = (GLOO, EXACT)


def _coded(elements: int, ops: tuple[str, ...] = OPS) -> tuple[tuple[str, int, tuple[str, ...]], ...]:
    return tuple((op, elements, (CODED,)) for op in ops)


_FAR: dict[str, Any] = {"rate": "50mbit", "delay": "20ms", "loss": "0.1%", "measures": _coded(64 * MIB, OPS[:1])}
_CPU: dict[str, Any] = {"rate": "100mbit", "measures": (("exchange", 16 * MIB, BOTH),)}
SETS = {
    "8 hosts": Set(8, "50mbit", _coded(16 * MIB, OPS[:1])),
    "100mbit, secret": Set(2, "100mbit", _coded(16 * MIB), secret=True),
    "1gbit, secret": Set(2, "1gbit", _coded(64 * MIB), secret=True),
    "4 hosts, secret": Set(4, "100mbit", _coded(16 * MIB), secret=True),
    "far": Set(2, **_FAR),
    "far, 4 hosts": Set(4, **_FAR),
    "far, cubic": Set(2, **_FAR, congestion="cubic"),
    "far, cubic, 4 hosts": Set(4, **_FAR, congestion="cubic"),
    "sizes": Set(2, "unshaped", tuple((op, n, BOTH) for op in SUMS for n in SIZES)),
    "message": Set(2, "unshaped", (("exchange", 8 * MIB, BOTH),)),
    "cpu": Set(2, **_CPU),
    "cpu, secret": Set(2, **_CPU, secret=True),
    "busy": Set(2, "100mbit", (("all_reduce", 16 * MIB, (GLOO, CODED)),), busy=True),
}
# Least share of the ideal, by set.
SHARES = {
    "8 hosts": 0.90,
    "100mbit, secret": 0.94,
    "1gbit, secret": 0.93,
    "4 hosts, secret": 0.92,
    "far": 0.90,
    "far, 4 hosts": 0.90,
    "far, cubic": 0.80,
    "far, cubic, 4 hosts": 0.80,
    "busy": 0.85,
}
MOST_CPU, MOST_SECRET_CPU_S_A_GB = 0.4, 1.5


def gates(rows: list[dict[str, Any]]) -> list[report.Gate]:
    """A gate a target, and that results are right."""
    of = {(row["set"], row["group"]): row for row in rows}
    held = [report.Gate("results that are not what they must be", sum(row["wrong"] for row in rows), "==", 0)]
    for row in rows:
        name, group = row["set"], row["group"]
        what = f"{name}, {row['op']}"
        if group == CODED:
            held.append(report.Gate(f"{what}: share of the ideal", row["of_ideal"], ">=", SHARES[name]))
        elif group == EXACT and name == "sizes":
            size = f"{row['elements'] * 4 / 2**10:g} KiB"
            held.append(report.Gate(f"{what} of {size}: times gloo", row["times_gloo"], ">=", 1.0))
        elif group == EXACT and name == "cpu":
            held.append(report.Gate(f"{what}: CPU / gloo's", row["cpu_s"] / of[name, GLOO]["cpu_s"], "<=", MOST_CPU))
            if secret := of.get(("cpu, secret", EXACT)):
                more = secret["cpu_s_a_gb"] - row["cpu_s_a_gb"]
                held.append(report.Gate(f"{what}: CPU s a GB that a secret adds", more, "<=", MOST_SECRET_CPU_S_A_GB))
    return held


def main() -> int:
    """Runs all, and reports."""
    parser = report.arguments(__doc__, quick="3 repetitions, and tensors of 1 MiB at most")
    parser.add_argument("--only", nargs="+", choices=SETS, metavar="SET", help=f"of: {', '.join(SETS)}")
    args = parser.parse_args()
    print(report.heading("tcp_links", quick=args.quick))
    print(COLUMNS.heading(), flush=True)
    rows: list[dict[str, Any]] = []
    for name in args.only or SETS:
        chosen = SETS[name]
        if args.quick:
            small = tuple((op, min(elements, MIB), kinds) for op, elements, kinds in chosen.measures)
            chosen = dataclasses.replace(chosen, measures=tuple(dict.fromkeys(small)))
        with chosen.lab() as lab:
            rows += measure(name, chosen, lab, 3 if args.quick else 9)
    return report.finish(gates(rows), args.json, {"rows": rows})
