"""Measures a connection between two ranks: round trips, and goodput each way, alone and both at once."""

import threading
import time
from typing import Any

from torch_lowcomm.cli.sockets import Connection

_PINGS, _PING_BYTES = 20, 64
_BLOCK_BYTES = 1 << 16


def measure(link: Connection, seconds: float, *, leads: bool) -> dict[str, Any]:
    """Runs one end: round trips, then for `seconds` each from leader to follower, from follower to leader, and both at once.

    Returns:
        "rtt_us", the leader's round trips; "alone" and "both", Mbit/s that came to this end.
    """
    got: dict[str, Any] = {}
    ping = bytes(_PING_BYTES)
    if leads:
        got["rtt_us"] = []
        for i in range(_PINGS + 1):
            start = time.perf_counter()
            link.send(ping)
            link.receive(_PING_BYTES)
            if i > 0:  # the first finds caches and TCP cold
                got["rtt_us"].append((time.perf_counter() - start) * 1e6)
        _fill(link, seconds)
        got["alone"] = _drain(link, seconds)
    else:
        for _ in range(_PINGS + 1):
            link.receive(_PING_BYTES)
            link.send(ping)
        got["alone"] = _drain(link, seconds)
        _fill(link, seconds)
    failed: list[Exception] = []

    def send() -> None:
        try:
            _fill(link, seconds)
        except Exception as error:  # raised by the thread that waits for this one
            failed.append(error)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        got["both"] = _drain(link, seconds)
    finally:
        sender.join()
    if failed:
        raise failed[0]
    return got


def _fill(link: Connection, seconds: float) -> None:
    """Sends blocks that begin with 1 for the given time, then one that begins with 0."""
    block = b"\x01" + bytes(_BLOCK_BYTES - 1)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        link.send(block)
    link.send(bytes(_BLOCK_BYTES))


def _drain(link: Connection, seconds: float) -> float:
    """Receives such blocks; returns their goodput in Mbit/s without those of the first sixth of the seconds, or, where this end
    was so late that all were there by then, without the first.
    """
    start = time.perf_counter()
    since, counted, arrivals = start, 0, []
    while True:
        more = link.receive(_BLOCK_BYTES)[0] == 1
        now = time.perf_counter()
        arrivals.append(now)
        if now - start < seconds / 6:
            since = now
        else:
            counted += _BLOCK_BYTES
        if not more:
            break
    if counted == 0 and len(arrivals) > 2:
        since, counted = arrivals[0], (len(arrivals) - 1) * _BLOCK_BYTES
    if counted == 0:
        raise RuntimeError(
            f"expected a block of {_BLOCK_BYTES} bytes after {seconds / 6:g} s, got none: the link needs more --seconds"
        )
    return counted * 8 / (now - since) / 1e6
