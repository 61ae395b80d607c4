"""What lowcomm's TCP transport makes of links: long ones, lossy ones, full and busy ones, and none at all.

    python benchmarks tcp_links [--quick] [--only SET …] [--json FILE]        # as root

benchmarks/results/tcp_links.md has the definitions.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import secrets
import statistics
from typing import Any

import report
from tables import Columns

from linklab.job import run_on_hosts
from linklab.lab import Lab
from linklab.link import ideal_s, parse_bits

MIB = 1 << 18  # float32 elements
OPS = ("all_reduce", "all_gather", "reduce_scatter", "exchange")
SUMS = ("all_reduce", "all_gather", "reduce_scatter")
SIZES = (1 << 10, 1 << 14, 1 << 16, MIB, 4 * MIB, 16 * MIB, 64 * MIB)  # 4 KiB to 64 MiB


@dataclasses.dataclass(frozen=True)
class Set:
    """Hosts, their links, and the ops on them: (op, elements, kinds of groups)."""

    hosts: int
    rate: str
    measures: tuple[tuple[str, int, tuple[str, ...]], ...]
    delay: str | None = None
    loss: str | None = None
    congestion: str | None = None  # the only one that ranks take; None: the library's choice
    secret: bool = False
    busy: bool = False  # processes take all cores


def _coded(elements: int, ops: tuple[str, ...] = OPS) -> tuple[tuple[str, int, tuple[str, ...]], ...]:
    return tuple((op, elements, ("coded",)) for op in ops)


_FAR: dict[str, Any] = {"rate": "50mbit", "delay": "20ms", "loss": "0.1%", "measures": _coded(64 * MIB, OPS[:1])}
_EXACT: dict[str, Any] = {"rate": "100mbit", "measures": (("exchange", 16 * MIB, ("gloo", "exact")),)}
SETS = {
    "8 hosts": Set(8, "50mbit", _coded(16 * MIB, OPS[:1])),
    "100mbit, secret": Set(2, "100mbit", _coded(16 * MIB), secret=True),
    "1gbit, secret": Set(2, "1gbit", _coded(64 * MIB), secret=True),
    "4 hosts, secret": Set(4, "100mbit", _coded(16 * MIB), secret=True),
    "far": Set(2, **_FAR),
    "far, 4 hosts": Set(4, **_FAR),
    "far, cubic": Set(2, **_FAR, congestion="cubic"),
    "far, cubic, 4 hosts": Set(4, **_FAR, congestion="cubic"),
    "sizes": Set(2, "unshaped", tuple((op, n, ("gloo", "exact")) for op in SUMS for n in SIZES)),
    "message": Set(2, "unshaped", (("exchange", 8 * MIB, ("gloo", "exact")),)),
    "cpu": Set(2, **_EXACT),
    "cpu, secret": Set(2, **_EXACT, secret=True),
    "busy": Set(2, "100mbit", (("all_reduce", 16 * MIB, ("gloo", "coded")),), busy=True),
}
COLUMNS = Columns(
    "set 21 | op 15 | MiB 10.4g | group 8 | median ms 11.2f | spread % 9.1f | % ideal 9.1f | CPU s/GB 10.2f | again 9 | "
    "congestion 12"
)
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


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = report.arguments(__doc__, quick="3 repetitions, and tensors of 1 MiB at most")
    parser.add_argument("--only", nargs="+", choices=SETS, metavar="SET", help=f"of: {', '.join(SETS)}")
    return parser.parse_args()


def measure(name: str, chosen: Set, *, quick: bool) -> list[dict[str, Any]]:
    """A row an op, size and kind of group, of all ranks."""
    measures = [(op, min(elements, MIB if quick else elements), kinds) for op, elements, kinds in chosen.measures]
    job = {
        "measures": measures,
        "repetitions": 3 if quick else 9,
        "secret": secrets.token_urlsafe(32) if chosen.secret else "",
        "busy": os.cpu_count() if chosen.busy else 0,
    }
    env = {"LOWCOMM_CONGESTION": chosen.congestion} if chosen.congestion else {}
    with Lab(hosts=chosen.hosts, rate=chosen.rate, delay=chosen.delay, loss=chosen.loss) as lab:
        of_ranks = run_on_hosts(lab, "linklab.tcp_links_rank", job, env=env)
    return [joined(name, chosen, same) for same in zip(*of_ranks, strict=True)]


def joined(name: str, chosen: Set, same: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """One row of all ranks': a repetition lasts from the first rank's start to the last one's end; the CPU is their sum."""
    row = {"set": name, **{key: same[0][key] for key in ("op", "elements", "kind")}}
    row["mib"] = row["elements"] * 4 / 2**20
    spans = zip(*(one["times"] for one in same), strict=True)
    seconds = [max(end for _, end in one) - min(start for start, _ in one) for one in spans]
    quarter, median, three_quarters = statistics.quantiles(seconds, n=4)
    sent = max(one["sent_bytes"] for one in same)
    cpu_s = statistics.median(sum(one) for one in zip(*(one["cpu_s"] for one in same), strict=True))
    bits = parse_bits(chosen.rate)
    return row | {
        "seconds": seconds,
        "median_s": median,
        "spread": (three_quarters - quarter) / median,
        "of_ideal": ideal_s(sent, bits) / median if bits else None,
        "cpu_s": cpu_s,
        "cpu_s_a_gb": cpu_s / (sum(one["sent_bytes"] for one in same) / 1e9),
        "retransmitted": None if same[0]["retransmitted"] is None else sum(one["retransmitted"] for one in same),
        "congestion": same[0].get("congestion"),
    }


def gates(rows: list[dict[str, Any]]) -> list[report.Gate]:
    """A gate a target."""
    of = {(row["set"], row["op"], row["elements"], row["kind"]): row for row in rows}
    held = []

    def ratio(key: tuple[str, str, int], field: str) -> float:
        gloo = of.get((*key, "gloo"))
        return gloo[field] / of[(*key, "exact")][field] if gloo else math.nan

    for row in rows:
        name, op, elements, kind = row["set"], row["op"], row["elements"], row["kind"]
        what = f"{name}, {op}"
        if kind == "coded":
            held.append(report.Gate(f"{what}: share of the ideal", row["of_ideal"], ">=", SHARES[name]))
        elif kind == "exact" and name == "sizes":
            size = f"{elements * 4 / 2**10:g} KiB"
            held.append(
                report.Gate(f"{what} of {size}: times gloo", ratio((name, op, elements), "median_s"), ">=", 1.0)
            )
        elif kind == "exact" and name == "cpu":
            cpu = 1 / ratio((name, op, elements), "cpu_s")
            held.append(report.Gate(f"{what}: CPU / gloo's", cpu, "<=", MOST_CPU))
            if secret := of.get(("cpu, secret", op, elements, "exact")):
                more = secret["cpu_s_a_gb"] - row["cpu_s_a_gb"]
                held.append(report.Gate(f"{what}: CPU s a GB that a secret adds", more, "<=", MOST_SECRET_CPU_S_A_GB))
    return held


def main() -> int:
    """Runs all, and reports."""
    args = parse()
    print(report.heading("tcp_links", quick=args.quick))
    print(COLUMNS.heading(), flush=True)
    rows: list[dict[str, Any]] = []
    for name in args.only or SETS:
        mine = measure(name, SETS[name], quick=args.quick)
        for row in mine:
            share = None if row["of_ideal"] is None else 100 * row["of_ideal"]
            times = 1e3 * row["median_s"], 100 * row["spread"], share, row["cpu_s_a_gb"]
            print(
                COLUMNS.row(name, row["op"], row["mib"], row["kind"], *times, row["retransmitted"], row["congestion"])
            )
        rows += mine
    return report.finish(gates(rows), args.json, {"rows": rows})
