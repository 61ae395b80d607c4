"""Measure the link between every two ranks: round trips, bandwidth each way, alone and both at once.

The bench uses plain TCP sockets, whose addresses the ranks gather over the group: the figures are those of the link and the
hosts' TCP, without a backend. One pair measures at a time; the other ranks wait. A rank listens on the address from which it
reaches MASTER_ADDR, or on that of LOWCOMM_SOCKET_IFNAME; `doctor` compares all.

columns
  a, b           the two ranks
  rtt            us from a and back, 64 bytes each way: median, fastest, distance of the quartiles / median
  a->b, b->a     goodput in Mbit/s (10^6) as the receiver sees it, one way at a time: bytes after the first sixth
                 / the time that they took. This leaves out TCP's start and the burst of a shaper
  a->b*, b->a*   goodput with both ways busy
"""

import argparse
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torch_lowcomm._all_gather_json import all_gather_json
from torch_lowcomm.cli.bench import report
from torch_lowcomm.cli.bench.sockets import Connection, Listener, own_ip
from torch_lowcomm.cli.machine import heading

_PING_BYTES = 64
_BLOCK_BYTES = 1 << 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add("--seconds", type=float, default=3.0, metavar="S", help="seconds for which each direction is filled (3)")
    add("--pings", type=int, default=200, metavar="N", help="round trips (200)")
    add("--json", type=Path, metavar="FILE", help="write versions, machine, options and every round trip to FILE")


def run(job: argparse.Namespace) -> int:
    """Runs one rank; rank 0 prints and writes. Returns the exit status."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks < 2:
        raise ValueError(f"expected at least 2 ranks, got {ranks}")
    first = rank == 0
    options = {"ranks": ranks, "seconds": job.seconds, "pings": job.pings}
    if first:
        print(heading("torch_lowcomm bench link", **options), _columns(), sep="\n", flush=True)
    with Listener(rank, (own_ip(), 0), job.timeout) as listener:
        addresses = all_gather_json(listener.address)
        rows = []
        for a in range(ranks):
            for b in range(a + 1, ranks):
                row = _pair(job, rank, a, b, listener, addresses)
                rows.append(row)
                if first:
                    print(_line(row), flush=True)
    if first and job.json:
        report.write_json(job.json, op="link", options=options, rows=rows)
    return 0


def _pair(
    job: argparse.Namespace, rank: int, a: int, b: int, listener: Listener, addresses: list[Any]
) -> dict[str, Any]:
    mine: dict[str, Any] = {}
    if rank in (a, b):
        with listener.accept(b) if rank == a else Connection.to(addresses[a], rank, a, job.timeout) as link:
            mine = _measure(job, link, leads=rank == a)
    everyone = all_gather_json(mine)
    rtt = everyone[a]["rtt_us"]
    quarters = statistics.quantiles(rtt, n=4, method="inclusive") if len(rtt) > 1 else rtt * 3
    median = statistics.median(rtt)
    return {
        "a": a,
        "b": b,
        "rtt_us": median,
        "rtt_min_us": min(rtt),
        "rtt_spread": (quarters[2] - quarters[0]) / median,
        "rtts_us": rtt,
        "a_to_b_mbit_s": everyone[b]["alone"],
        "b_to_a_mbit_s": everyone[a]["alone"],
        "a_to_b_both_mbit_s": everyone[b]["both"],
        "b_to_a_both_mbit_s": everyone[a]["both"],
    }


def measure_each_way(job: argparse.Namespace, link: Connection, *, leads: bool) -> dict[str, Any]:
    """Runs one end of a pair: round trips, then leader to follower, and follower to leader."""
    got: dict[str, Any] = {}
    ping = bytes(_PING_BYTES)
    if leads:
        got["rtt_us"] = []
        for i in range(job.pings + 1):
            start = time.perf_counter()
            link.send(ping)
            link.receive(_PING_BYTES)
            if i > 0:  # the first finds caches and TCP cold
                got["rtt_us"].append((time.perf_counter() - start) * 1e6)
        _fill(job, link)
        got["alone"] = _drain(job, link)
    else:
        for _ in range(job.pings + 1):
            link.receive(_PING_BYTES)
            link.send(ping)
        got["alone"] = _drain(job, link)
        _fill(job, link)
    return got


def _measure(job: argparse.Namespace, link: Connection, *, leads: bool) -> dict[str, Any]:
    """Runs one end of a pair: each way, then both at once."""
    got = measure_each_way(job, link, leads=leads)
    failed: list[Exception] = []

    def send() -> None:
        try:
            _fill(job, link)
        except Exception as error:  # raised by the thread that waits for this one
            failed.append(error)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        got["both"] = _drain(job, link)
    finally:
        sender.join()
    if failed:
        raise failed[0]
    return got


def _fill(job: argparse.Namespace, link: Connection) -> None:
    """Sends blocks that begin with 1 for the given time, then one that begins with 0."""
    block = b"\x01" + bytes(_BLOCK_BYTES - 1)
    end = time.perf_counter() + job.seconds
    while time.perf_counter() < end:
        link.send(block)
    link.send(bytes(_BLOCK_BYTES))


def _drain(job: argparse.Namespace, link: Connection) -> float:
    """Receives such blocks; returns their goodput in Mbit/s without those of the first sixth of the seconds."""
    start = time.perf_counter()
    since, counted = start, 0
    while True:
        more = link.receive(_BLOCK_BYTES)[0] == 1
        now = time.perf_counter()
        if now - start < job.seconds / 6:
            since = now
        else:
            counted += _BLOCK_BYTES
        if not more:
            break
    if counted == 0:
        raise RuntimeError(
            f"expected a block of {_BLOCK_BYTES} bytes after {job.seconds / 6:g} s, got none: the link needs more --seconds"
        )
    return counted * 8 / (now - since) / 1e6


_WIDTHS = (5, 5, 11, 11, 9, 11, 11, 11, 11)


def _columns() -> str:
    names = ("a", "b", "rtt", "min", "spread", "a->b", "b->a", "a->b*", "b->a*")
    units = ("", "", "(us)", "(us)", "(%)", *["(Mbit/s)"] * 4)
    return "\n".join("#" + report.aligned(cells, _WIDTHS)[1:] for cells in (names, units))


def _line(row: dict[str, Any]) -> str:
    rates = [f"{row[f'{way}_mbit_s']:.1f}" for way in ("a_to_b", "b_to_a", "a_to_b_both", "b_to_a_both")]
    cells = [row["a"], row["b"], f"{row['rtt_us']:.1f}", f"{row['rtt_min_us']:.1f}", f"{row['rtt_spread'] * 100:.0f}"]
    return report.aligned([*cells, *rates], _WIDTHS)
