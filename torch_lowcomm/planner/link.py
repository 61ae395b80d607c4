"""The slow links of a plan: how long an exchange between sites takes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

SEGMENT_PAYLOAD, SEGMENT_FRAME = 1448, 1514  # bytes: of a full TCP segment with timestamps, and of its Ethernet frame
FLOWS = 16  # connections to each peer on a link of a long round trip (docs/transport.md)
_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)bit", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")
_FACTOR = {"k": 1e3, "m": 1e6, "g": 1e9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
# Share of the ideal that an all_reduce in 4 bits reaches, by sites; log2 of their number in between
# (benchmarks/results/linklab.md, tcp_links.md).
_REACHED = ((1.0, 0.95), (2.0, 0.90), (3.0, 0.79))


@dataclasses.dataclass(frozen=True)
class Link:
    """Sites that exchange tensors, each over one slow link.

    Attributes:
        sites: Ends of slow links: 1 or more.
        up, down: Bytes of payload a second that a site can send and receive.
        round_trip_s: Between two sites.
        loss: Share of the segments that are lost, 0 to under 1. It bounds the rate where the kernel has no BBR: a flow of Reno or
            Cubic carries 1.22 segments / (round trip · √loss) (Mathis et al., 1997).
        ranks_per_site: They share the link, and send one copy of a tensor over it together.
    """

    sites: int
    up: float
    down: float
    round_trip_s: float = 0.0
    loss: float = 0.0
    ranks_per_site: int = 1

    def __post_init__(self) -> None:
        for name, least in (("sites", 1), ("ranks_per_site", 1)):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"plan: {name}: expected {least} or more, got {value}")
        for name in ("up", "down"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ValueError(f"plan: link: expected a rate above 0 {name}, got {value:g} bytes/s")
        if not 0 <= self.round_trip_s < math.inf or not 0 <= self.loss < 1:
            raise ValueError(
                f"plan: link: expected a round trip of 0 or more and a loss of 0 to under 1, got {self.round_trip_s} s, "
                f"{self.loss}"
            )

    @classmethod
    def of(cls, rate: str, sites: int, *, round_trip: str = "0ms", loss: float = 0.0, ranks_per_site: int = 1) -> Link:
        """Makes links of a rate, "100mbit" or "10mbit/100mbit" (up / down), and a round trip, "40ms"; headers count."""
        rates = [_parsed(_RATE, part, "rate", '"100mbit" or "10mbit/100mbit"') for part in rate.split("/")]
        if len(rates) > 2:
            raise ValueError(f'plan: rate: expected "100mbit" or "10mbit/100mbit", got {rate!r}')
        up, down = (bits / 8 * SEGMENT_PAYLOAD / SEGMENT_FRAME for bits in (rates[0], rates[-1]))
        return cls(sites, up, down, _parsed(_TIME, round_trip, "round trip", '"40ms"'), loss, ranks_per_site)

    @classmethod
    def measured(cls, path: str | Path) -> Link:
        """Reads what `python -m torch_lowcomm doctor --json` wrote: the slowest pair of hosts, by its best address."""
        try:
            found: dict[str, Any] = json.loads(Path(path).read_text())
            rows, hosts, ranks = found["rows"], int(found["hosts"]), int(found["ranks"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"plan: {path}: expected the JSON of `doctor --json`, got {error!r}") from None
        best: dict[tuple[int, int], dict[str, Any]] = {}
        for row in rows:
            pair = (row["from"], row["to"])
            if row["rates"] and (pair not in best or min(row["rates"]) > min(best[pair]["rates"])):
                best[pair] = row
        if not best:
            raise ValueError(f"plan: {path}: expected a pair of hosts that reach each other, got none")
        if ranks % hosts:
            raise ValueError(f"plan: {path}: expected as many ranks on every host, got {ranks} on {hosts}")
        slowest = min(best.values(), key=lambda row: min(row["rates"]))
        rate = min(slowest["rates"]) * 1e6 / 8
        return cls(hosts, rate, rate, max(row["rtt_us"] for row in best.values()) / 1e6, 0.0, ranks // hosts)

    @property
    def ranks(self) -> int:
        """All ranks of all sites."""
        return self.sites * self.ranks_per_site

    def exchange_s(self, sent: float, *, round_trips: int = 1, reached: bool = True) -> float:
        """Seconds of an exchange in which each site sends and receives so many bytes.

        With `reached` the rate is the measured share of the ideal that collectives of so many sites reach.
        """
        most = math.inf
        if self.loss and self.round_trip_s and not _has_bbr():
            most = FLOWS * 1.22 * SEGMENT_PAYLOAD / (self.round_trip_s * math.sqrt(self.loss))
        share = _share(self.sites) if reached else 1.0
        return sent / (min(self.up, self.down, most) * share) + round_trips * self.round_trip_s

    def all_reduce_s(self, coded: float) -> float:
        """Seconds of an all_reduce of a tensor that is so many bytes in codes: 2(W - 1)/W of them each way, in two exchanges."""
        return self.exchange_s(2 * (self.sites - 1) / self.sites * coded, round_trips=2) if self.sites > 1 else 0.0

    def gather_s(self, coded: float) -> float:
        """Seconds of an all_gather or a reduce_scatter of a whole tensor of so many bytes: (W - 1)/W of them each way."""
        return self.exchange_s((self.sites - 1) / self.sites * coded) if self.sites > 1 else 0.0


def _share(sites: int) -> float:
    at = math.log2(max(sites, 2))
    for (low, a), (high, b) in itertools.pairwise(_REACHED):
        if at <= high:
            return a + (b - a) * (at - low) / (high - low)
    return _REACHED[-1][1]


def _has_bbr() -> bool:
    path = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
    return path.exists() and "bbr" in path.read_text().split()


def _parsed(pattern: re.Pattern[str], text: str, name: str, expected: str) -> float:
    match = pattern.fullmatch(text.strip())
    if not match:
        raise ValueError(f"plan: {name}: expected a number and a unit, such as {expected}, got {text!r}")
    return float(match[1]) * _FACTOR[match[2].lower()]
