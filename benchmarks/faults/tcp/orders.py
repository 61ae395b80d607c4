"""Orders of the lab's owner: what a rank's process does to itself, in a thread beside its ops."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from faults.stage import PORT, Notes

_LOW = 64  # file descriptors
_AF_UNSPEC = struct.pack("H14x", 0)


def obey(notes: Notes, rank: int, stop: threading.Event) -> None:
    """Carries out each order of this rank once, when it is given, until `stop`."""
    done: set[str] = set()
    orders: dict[str, Callable[[], None]] = {"reset": reset, "disconnect": disconnect, "starve": starve}
    while not stop.wait(0.003):
        for order, carry_out in orders.items():
            for name in (f"{order}{rank}", f"{order}{rank} again"):
                if name not in done and notes.said(name):
                    done.add(name)
                    carry_out()
                    notes.say(f"{name}.done")


def _connections() -> list[socket.socket]:
    """The connections of the port's that this process has, each a duplicate."""
    found = []
    for path in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):
            if not path.readlink().name.startswith("socket:"):
                continue
            one = socket.socket(fileno=os.dup(int(path.name)))
            if one.family == socket.AF_INET and PORT in (one.getsockname()[1], one.getpeername()[1]):
                found.append(one)
            else:
                one.close()
    return found


def reset() -> None:
    """Shuts all connections down."""
    for one in _connections():
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()


def disconnect() -> None:
    """Resets all connections at once: a reset leaves for the peer, and nothing is sent again."""
    libc = ctypes.CDLL(None)
    for one in _connections():
        libc.connect(one.fileno(), _AF_UNSPEC, len(_AF_UNSPEC))
        one.close()


def fill_low_numbers() -> None:
    """Takes all file descriptors of low numbers, so that the port's connections get higher ones: see starve()."""
    while os.dup(2) < _LOW:
        pass


def starve(seconds: float = 2.0) -> None:
    """Leaves this process no new file descriptor for some seconds, and shuts all connections down.

    The limit is lowered to the numbers that are taken, which are more than poll() is asked for; what becomes free above it
    cannot be had.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    mine = _connections()
    resource.setrlimit(resource.RLIMIT_NOFILE, (_LOW, hard))
    try:
        for one in mine:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        time.sleep(seconds)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
