"""A lab as a rank on one of its hosts knows it."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import time
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_PATIENCE_S = 40.0


@dataclasses.dataclass
class Home:
    """The hosts' namespaces, in rank order, and a folder of notes that the lab's owner answers."""

    namespaces: list[str]
    folder: str

    def enter(self, rank: int) -> None:
        """Moves this thread, and all that it starts, to its host."""
        libc = ctypes.CDLL(None, use_errno=True)
        with Path(f"/var/run/netns/{self.namespaces[rank]}").open() as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns to {self.namespaces[rank]}")
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"

    def ask(self, what: str) -> None:
        """`cut` or `restore` of the faulty rank's host; returns when it is done."""
        (Path(self.folder) / what).touch()
        end = time.monotonic() + _PATIENCE_S
        while not (Path(self.folder) / f"{what}.done").exists():
            if time.monotonic() > end:
                raise TimeoutError(f"{what}: expected the lab to do it within {_PATIENCE_S} s")
            time.sleep(0.002)


def interface_bytes() -> int:
    """Returns the bytes that have passed this host's interface, both ways."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            fields = numbers.split()
            return int(fields[0]) + int(fields[8])
    raise RuntimeError("expected an interface eth0")
