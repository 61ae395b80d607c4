"""Is the lab what it says? Plain TCP on every link, before anything else is measured on it."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Collection, Iterator
from typing import Any

from tables import Columns

from linklab.errors import LabError
from linklab.job import ON_HOSTS
from linklab.jobs import Job
from linklab.lab import Lab
from linklab.link import Link, goodput_bits

GOODPUT_WITHIN = 0.03
DELAY_WITHIN, DELAY_SLACK_S = 0.05, 0.5e-3
STREAM_S = 2.5
UNSHAPED_BYTES = 1 << 30
ROUND_TRIPS = 21
KINDS = ("goodput", "round trip")
_DEADLINE_S = 120
_COLUMNS = Columns("measured 12 | hosts 10 | expected 10.3f | is 10.3f | unit 13")


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement: `deviation` from what the lab promises may be `within`, or None where it promises nothing."""

    what: str  # one of KINDS, or forwarder: what it lost against orders
    way: str  # hosts
    expected: float | None  # bit/s, seconds
    measured: float
    deviation: float | None  # share of the expected, or frames
    within: float | None

    @property
    def holds(self) -> bool:
        """Whether the promise is kept; True where there is none."""
        return self.deviation is None or (self.within is not None and self.deviation <= self.within)


def path_bits(source: Link, sink: Link) -> float | None:
    """The rate of the way from one host to another; None where neither end is shaped."""
    return min((bits for bits in (source.up_bits, sink.down_bits) if bits is not None), default=None)


def validate(lab: Lab, *, tries: int = 3, only: Collection[str] = KINDS) -> list[Row]:
    """Measures host 0 of an idle lab with each other, both ways; a LabError where a probe fails. A stream whose goodput is off by
    more than 3 % is tried again, and the last is reported: what else the machine does can take a link's time, but gives it none.
    """
    rows = []
    with _serving(lab):
        for other in range(1, lab.hosts):
            if "goodput" in only:
                rows += [_goodput(lab, *way, tries) for way in ((other, 0), (0, other))]
            if "round trip" in only and lab.links[0].delay_s + lab.links[other].delay_s:
                rows.append(_round_trip(lab, other))
    if drops := lab.forwarder_drops():
        rows.append(Row("forwarder", "all", 0, drops, drops, 0))
    return rows


@contextlib.contextmanager
def _serving(lab: Lab) -> Iterator[None]:
    servers: list[Job] = [
        lab.start_on(host, [sys.executable, "-m", "linklab.probes", "serve", lab.address(host)], env=ON_HOSTS)
        for host in range(lab.hosts)
    ]
    try:
        yield
    finally:
        for server in servers:
            server.kill()


def _probe(lab: Lab, kind: str, source: int, sink: int, number: int) -> float:
    command = [sys.executable, "-m", "linklab.probes", kind, lab.address(sink), str(number)]
    [ended] = lab.start_on(source, command, env=ON_HOSTS).wait(_DEADLINE_S)
    if ended.code != 0:
        raise LabError(f"probe {kind} from host {source} to {sink} ended with {ended.code}: {ended.output[-2000:]}")
    return float(ended.output)


def _goodput(lab: Lab, source: int, sink: int, tries: int) -> Row:
    bits = path_bits(lab.links[source], lab.links[sink])
    way = f"{source} to {sink}"
    if bits is None:
        return Row("goodput", way, None, _probe(lab, "stream", source, sink, UNSHAPED_BYTES), None, None)
    expected = goodput_bits(bits)
    # A window that opens takes round trips; the first quarter is not counted.
    seconds = STREAM_S + 40 * (lab.links[source].delay_s + lab.links[sink].delay_s)
    for _ in range(tries):
        measured = _probe(lab, "stream", source, sink, int(bits / 8 * seconds))
        off = abs(measured / expected - 1)
        if off <= GOODPUT_WITHIN:
            break
    if lab.links[source].loss or lab.links[sink].loss:
        return Row("goodput", way, expected, measured, None, None)  # TCP's answer to losses is not the lab's
    return Row("goodput", way, expected, measured, off, GOODPUT_WITHIN)


def _round_trip(lab: Lab, other: int) -> Row:
    expected = lab.links[0].delay_s + lab.links[other].delay_s
    measured = _probe(lab, "echo", other, 0, ROUND_TRIPS)
    # Two processes that wake up cost some tenths of a millisecond, which are not the link's.
    off = max(0.0, abs(measured - expected) - DELAY_SLACK_S) / expected
    return Row("round trip", f"{other} and 0", expected, measured, off, DELAY_WITHIN)


def table(rows: list[Row]) -> str:
    """Fixed-width rows: rates in Mbit/s, round trips in ms."""
    units = {"goodput": (1e-6, "Mbit/s"), "round trip": (1e3, "ms"), "forwarder": (1, "frames lost")}
    lines = [_COLUMNS.heading()]
    for row in rows:
        scale, unit = units[row.what]
        expected = None if row.expected is None else row.expected * scale
        lines.append(_COLUMNS.row(row.what, row.way, expected, row.measured * scale, unit))
    return "\n".join(lines)


def as_json(rows: list[Row]) -> list[dict[str, Any]]:
    """The rows as the JSON file holds them."""
    return [dataclasses.asdict(row) for row in rows]
