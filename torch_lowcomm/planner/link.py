"""The slow links of a plan: how long an exchange between sites takes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from pathlib import Path
from typing import Any

SEGMENT_PAYLOAD, SEGMENT_FRAME = 1448, 1514  # bytes: of a full TCP segment with timestamps, and of its Ethernet frame
FLOWS = 16  # connections to each peer on a link of a long round trip (docs/transport.md)
_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)bit", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")
_FACTOR = {"k": 1e3, "m": 1e6, "g": 1e9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
# The share of the ideal that all_reduces in 4 bits reach is .95 with 2 sites, .87 with 4 and .79 with 8
# (benchmarks/results/linklab.md, tcp_links.md); nothing was measured with more.
_REACHED, _LESS, _LEAST = 0.95, 0.08, 0.6


@dataclasses.dataclass(frozen=True)
class Link:
    """Sites that exchange tensors, each over one slow link.

    Attributes:
        sites: Ends of slow links: 1 or more.
        rate: Bytes of payload a second that a site sends and receives at once; the lower one where its ways differ.
        round_trip_s: Between two sites.
        loss: Share of the segments that are lost, 0 to under 1. It bounds the rate where the kernel has no BBR: a flow of Reno or
            Cubic carries 1.22 segments / (round trip · √loss) (Mathis et al., 1997).
        ranks_per_site: They share the link, and send one copy of a tensor over it together.
    """

    sites: int
    rate: float
    round_trip_s: float = 0.0
    loss: float = 0.0
    ranks_per_site: int = 1

    def __post_init__(self) -> None:
        whole = min(self.sites, self.ranks_per_site) >= 1 and 0 < self.rate < math.inf
        if not whole or not 0 <= self.round_trip_s < math.inf or not 0 <= self.loss < 1:
            raise ValueError(f"plan: link: expected 1 or more, a rate above 0 and a loss of 0 to under 1, got {self}")

    @classmethod
    def of(cls, rate: str, sites: int, *, round_trip: str = "0ms", loss: float = 0.0, ranks_per_site: int = 1) -> Link:
        """Makes links of a rate, "100mbit" or "10mbit/100mbit" (up / down), and a round trip, "40ms"; headers count."""
        rates = [_parsed(_RATE, part, "rate", '"100mbit" or "10mbit/100mbit"') for part in rate.split("/")]
        if len(rates) > 2:
            raise ValueError(f'plan: rate: expected "100mbit" or "10mbit/100mbit", got {rate!r}')
        bytes_s = min(rates) / 8 * SEGMENT_PAYLOAD / SEGMENT_FRAME
        return cls(sites, bytes_s, _parsed(_TIME, round_trip, "round trip", '"40ms"'), loss, ranks_per_site)

    @classmethod
    def measured(cls, path: str | Path) -> Link:
        """Reads what `python -m torch_lowcomm doctor --json` wrote: the slowest pair of hosts, both ways busy."""
        try:
            found: dict[str, Any] = json.loads(Path(path).read_text())
            hosts, ranks = int(found["hosts"]), int(found["ranks"])
            rows = sorted((row for row in found["rows"] if row["both"]), key=lambda row: min(row["both"]))
            best = {(row["from"], row["to"]): (min(row["both"]), row["rtt_us"]) for row in rows}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"plan: {path}: expected the JSON of `doctor --json`, got {error!r}") from None
        if not best:
            raise ValueError(f"plan: {path}: expected a pair of hosts that reach each other, got none")
        if ranks % hosts:
            raise ValueError(f"plan: {path}: expected as many ranks on every host, got {ranks} on {hosts}")
        rates, round_trips = zip(*best.values(), strict=True)
        return cls(hosts, min(rates) * 1e6 / 8, max(round_trips) / 1e6, 0.0, ranks // hosts)

    @property
    def ranks(self) -> int:
        """All ranks of all sites."""
        return self.sites * self.ranks_per_site

    @property
    def share(self) -> float:
        """(W - 1)/W, what a site sends of a tensor that is gathered or scattered."""
        return (self.sites - 1) / self.sites

    @property
    def carried(self) -> float:
        """The rate, or what lost segments leave of it: bytes a second."""
        if not self.loss or not self.round_trip_s or _has_bbr():
            return self.rate
        return min(self.rate, FLOWS * 1.22 * SEGMENT_PAYLOAD / (self.round_trip_s * math.sqrt(self.loss)))

    def exchange_s(self, sent: float, *, round_trips: int = 1) -> float:
        """Seconds of an exchange in which each site sends and receives so many bytes."""
        reached = max(_LEAST, _REACHED - _LESS * (math.log2(max(self.sites, 2)) - 1))
        return sent / (self.carried * reached) + round_trips * self.round_trip_s

    def all_reduce_s(self, coded: float) -> float:
        """Seconds of an all_reduce of a tensor that is so many bytes in codes: 2(W - 1)/W of them each way, in two exchanges."""
        return self.exchange_s(2 * self.share * coded, round_trips=2) if self.sites > 1 else 0.0

    def gather_s(self, coded: float) -> float:
        """Seconds of an all_gather or a reduce_scatter of a whole tensor of so many bytes: (W - 1)/W of them each way."""
        return self.exchange_s(self.share * coded) if self.sites > 1 else 0.0


def _has_bbr() -> bool:
    path = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
    asked = os.environ.get("LOWCOMM_CONGESTION") or "bbr"
    return asked == "bbr" and path.exists() and "bbr" in path.read_text().split()


def _parsed(pattern: re.Pattern[str], text: str, name: str, expected: str) -> float:
    match = pattern.fullmatch(text.strip())
    if not match:
        raise ValueError(f"plan: {name}: expected a number and a unit, such as {expected}, got {text!r}")
    return float(match[1]) * _FACTOR[match[2].lower()]
