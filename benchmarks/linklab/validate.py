"""Is the lab what it says? Plain TCP and UDP on every link, before anything else is measured on it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from linklab.errors import LabError
from linklab.jobs import Job
from linklab.lab import Lab
from linklab.link import Link, goodput_bits
from linklab.probes import DATAGRAM_FRAME

GOODPUT_WITHIN = 0.03
DELAY_WITHIN, DELAY_SLACK_S = 0.05, 0.5e-3
STREAM_S, EXCHANGE_S = 2.5, 2.0
UNSHAPED_BYTES = 1 << 30
ROUND_TRIPS = 21
DATAGRAMS = 3000
KINDS = ("goodput", "loss", "round trip", "exchange")
_DEADLINE_S = 120

# The environment in which a program on a host finds the modules of this folder's parent and those of the examples.
_FOLDERS = (str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "examples"))
ON_HOSTS = {"PYTHONPATH": os.pathsep.join(filter(None, (*_FOLDERS, os.environ.get("PYTHONPATH"))))}


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement: `deviation` from what the lab promises may be `within`, or None where it promises nothing."""

    what: str  # one of KINDS, or forwarder: what it lost against orders
    way: str  # hosts
    expected: float | None  # bit/s, seconds or a share
    measured: float
    deviation: float | None  # share of the expected (goodput, round trip); standard deviations (loss); frames (drops)
    within: float | None

    @property
    def holds(self) -> bool:
        """Whether the promise is kept; True where there is none."""
        return self.deviation is None or (self.within is not None and self.deviation <= self.within)


def path_bits(source: Link, sink: Link) -> float | None:
    """The rate of the way from one host to another; None where neither end is shaped."""
    return min((bits for bits in (source.up_bits, sink.down_bits) if bits is not None), default=None)


def validate(lab: Lab, *, tries: int = 3, only: Collection[str] = KINDS) -> list[Row]:
    """Measures host 0 with each other, both ways, and an exchange of hosts 0 and 1.

    Args:
        lab: Entered, and idle.
        tries: Of a stream whose goodput is off by more than 3 %: what else the machine does can take a link's time, but
            gives it none. The last is reported.
        only: Kinds of rows.

    Raises:
        LabError: A probe failed.
    """
    rows = []
    with _serving(lab):
        for other in range(1, lab.hosts):
            for source, sink in ((other, 0), (0, other)):
                if "goodput" in only:
                    rows.append(_goodput(lab, source, sink, tries))
                if "loss" in only and lab.links[source].loss:
                    rows.append(_loss(lab, source, sink))
            if "round trip" in only and lab.links[0].delay_s + lab.links[other].delay_s:
                rows.append(_round_trip(lab, other))
        if "exchange" in only:
            rows.append(_exchange(lab))
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


def _probe(lab: Lab, kind: str, source: int, sink: int, *numbers: int) -> float:
    command = [sys.executable, "-m", "linklab.probes", kind, lab.address(sink), *map(str, numbers)]
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


def _exchange(lab: Lab) -> Row:
    """No promise: it says what the machine can do, and bounds what is measured where the rate does not."""
    ways = [path_bits(lab.links[0], lab.links[1]), path_bits(lab.links[1], lab.links[0])]
    shaped = [bits for bits in ways if bits is not None]
    size = int(min(shaped) / 8 * EXCHANGE_S) if shaped else UNSHAPED_BYTES
    expected = goodput_bits(min(shaped)) if shaped else None
    return Row("exchange", "0 and 1", expected, _probe(lab, "exchange", 1, 0, size), None, None)


def _round_trip(lab: Lab, other: int) -> Row:
    expected = lab.links[0].delay_s + lab.links[other].delay_s
    measured = _probe(lab, "echo", other, 0, ROUND_TRIPS)
    # Two processes that wake up cost some tenths of a millisecond, which are not the link's.
    off = max(0.0, abs(measured - expected) - DELAY_SLACK_S) / expected
    return Row("round trip", f"{other} and 0", expected, measured, off, DELAY_WITHIN)


def _loss(lab: Lab, source: int, sink: int) -> Row:
    share = lab.links[source].loss
    bits = path_bits(lab.links[source], lab.links[sink]) or math.inf
    gap_us = max(250, round(2e6 * 8 * DATAGRAM_FRAME / bits))  # at half the rate no queue fills
    lost = DATAGRAMS - _probe(lab, "loss", source, sink, DATAGRAMS, gap_us)
    deviation = abs(lost - DATAGRAMS * share) / math.sqrt(DATAGRAMS * share * (1 - share))
    return Row("loss", f"{source} to {sink}", share, lost / DATAGRAMS, deviation, 5)


def table(rows: list[Row]) -> str:
    """Fixed-width rows: rates in Mbit/s, round trips in ms, losses in %."""
    scale = {"goodput": 1e-6, "exchange": 1e-6, "round trip": 1e3, "loss": 100, "forwarder": 1}
    unit = {"goodput": "Mbit/s", "exchange": "Mbit/s", "round trip": "ms", "loss": "%", "forwarder": "frames lost"}
    lines = [f"# {'measured':<12}{'hosts':<10}{'expected':>10}{'is':>10}  unit"]
    for row in rows:
        expected = "-" if row.expected is None else f"{row.expected * scale[row.what]:.3f}"
        lines.append(
            f"  {row.what:<12}{row.way:<10}{expected:>10}{row.measured * scale[row.what]:>10.3f}  {unit[row.what]}"
        )
    return "\n".join(lines)


def as_json(rows: list[Row]) -> list[dict[str, Any]]:
    """The rows as the JSON file holds them."""
    return [dataclasses.asdict(row) for row in rows]
