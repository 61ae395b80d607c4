"""Sets of ops on links: their measurement on hosts of a lab, and the rows of all ranks."""

from __future__ import annotations

import dataclasses
import os
import secrets
import statistics
from typing import Any

from tables import Columns

from linklab.job import run_on_hosts
from linklab.lab import Lab
from linklab.link import ideal_s, parse_rate
from linklab.rank import CODED, GLOO, RAW

MIB = 1 << 18  # float32 elements
OPS = ("all_reduce", "all_gather", "reduce_scatter", "exchange")
COLUMNS = Columns(
    "set 21 | op 15 | MiB 9.4g | group 15 | median ms 11.2f | spread % 9.1f | x gloo 8.2f | % ideal 8.1f | % raw 8.1f | "
    "sent MB 9.3f | wire MB 9.3f | CPU s/GB 10.2f | again 7 | error 9.1e | wrong 6"
)


@dataclasses.dataclass(frozen=True)
class Set:
    """Hosts, their links, and the ops on them: (op, elements of the whole tensor, kinds of groups as rank.py has them)."""

    hosts: int
    rate: str
    measures: tuple[tuple[str, int, tuple[str, ...]], ...]
    delay: str | None = None
    loss: str | None = None
    congestion: str | None = None  # the only one that ranks take; None: the library's choice
    secret: bool = False
    busy: bool = False  # processes take all cores
    last_rate: str | None = None  # of the last host, where it is slower than the others, in an all_reduce

    def lab(self) -> Lab:
        """Its hosts."""
        slow = {self.hosts - 1: self.last_rate} if self.last_rate else {}
        return Lab(hosts=self.hosts, rate=self.rate, rate_of=slow, delay=self.delay, loss=self.loss)


def measure(name: str, chosen: Set, lab: Lab, repetitions: int) -> list[dict[str, Any]]:
    """Measures a set and prints its rows. LabError when a rank fails."""
    job = {
        "addresses": [lab.address(host) for host in range(lab.hosts)],
        "measures": chosen.measures,
        "repetitions": repetitions,
        "secret": secrets.token_urlsafe(32) if chosen.secret else "",
        "busy": os.cpu_count() if chosen.busy else 0,
    }
    env = {"LOWCOMM_MIN_BYTES": "65536"}  # the user's sizes are no part of the question
    env |= {"LOWCOMM_CONGESTION": chosen.congestion} if chosen.congestion else {}
    rows = joined(name, chosen, run_on_hosts(lab, "linklab.rank", job, env=env))
    for row in rows:
        print(line(row), flush=True)
    return rows


def joined(name: str, chosen: Set, ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row of all ranks': a repetition lasts from the first rank's start to the last one's end; the CPU is their sum."""
    bits, rows = parse_rate(chosen.last_rate or chosen.rate)[0], []
    medians: dict[tuple[Any, ...], float] = {}
    for same in zip(*ranks, strict=True):
        row = {"set": name, **{key: same[0][key] for key in ("op", "elements", "group", "congestion")}}
        spans = zip(*(one["times"] for one in same), strict=True)
        seconds = [max(end for _, end in one) - min(start for start, _ in one) for one in spans]
        quarter, median, three_quarters = statistics.quantiles(seconds, n=4)
        medians[row["op"], row["elements"], row["group"]] = median
        counts = [one["counted_bytes"] for one in same]
        needed = max(one["needed_bytes"] for one in same)
        sent = needed if None in counts else max(counts)
        if chosen.last_rate:  # no rank can send less than the tensor
            sent = needed * len(same) // (2 * len(same) - 2)
        cpu_s = statistics.median(sum(one) for one in zip(*(one["cpu_s"] for one in same), strict=True))
        row |= {
            "seconds": seconds,
            "median_s": median,
            "spread": (three_quarters - quarter) / median,
            "of_ideal": ideal_s(sent, bits) / median if bits else None,
            "interface_bytes": max(statistics.median(one["interface_bytes"]) for one in same),
            "counted_bytes": None if None in counts else max(counts),
            "needed_bytes": needed,
            "cpu_s": cpu_s,
            "cpu_s_a_gb": cpu_s / (len(same) * sent / 1e9),
            "retransmitted": None if same[0]["retransmitted"] is None else sum(one["retransmitted"] for one in same),
            "relative_error": max(one["relative_error"] for one in same),
            "wrong": sum(not one["good"] for one in same) + len({one["crc"] for one in same}) - 1,
        }
        rows.append(row)
    for row in rows:
        gloo_s, raw_s = (medians.get((row["op"], row["elements"], kind)) for kind in (GLOO, RAW))
        row["times_gloo"] = gloo_s / row["median_s"] if gloo_s else None
        row["of_raw"] = raw_s / row["median_s"] if raw_s and row["group"] in (CODED, RAW) else None
    return rows


def line(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    shares = [None if row[name] is None else 100 * row[name] for name in ("of_ideal", "of_raw")]
    count = None if row["counted_bytes"] is None else row["counted_bytes"] / 1e6
    names = row["set"], row["op"], row["elements"] / MIB, row["group"]
    times = 1e3 * row["median_s"], 100 * row["spread"], row["times_gloo"]
    ends = row["interface_bytes"] / 1e6, row["cpu_s_a_gb"], row["retransmitted"], row["relative_error"], row["wrong"]
    return COLUMNS.row(*names, *times, *shares, count, *ends)
