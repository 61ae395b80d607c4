"""Where a row is played: hosts of a lab, and notes by which ranks and the lab's owner hear of each other."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

PORT = 29811  # of every rank
RELAY_PORT = 29700
PATIENCE_S = 60.0
_CLONE_NEWNET = 0x40000000
T = TypeVar("T")


def enter(namespace: str) -> None:
    """Moves this thread, and all that it starts, to a host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/var/run/netns/{namespace}").open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")


def inside(namespace: str, function: Callable[[], T]) -> T:
    """Returns what a function returns that is called on a host, in a thread of its own; raises what it raises."""
    ended: list[Any] = []

    def call() -> None:
        try:
            enter(namespace)
            ended.append((function(), None))
        except BaseException as error:
            ended.append((None, error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    value, error = ended[0]
    if error is not None:
        raise error
    return value


@dataclasses.dataclass(frozen=True)
class Notes:
    """Notes in a folder; and the hosts' namespaces, in rank order, with one more for who is no rank."""

    folder: str
    namespaces: tuple[str, ...]

    def say(self, name: str, text: object = "") -> None:
        """Leaves a note."""
        part = Path(self.folder) / f".{name}.{os.getpid()}.{threading.get_ident()}"
        part.write_text(str(text))
        part.rename(Path(self.folder) / name)

    def said(self, name: str) -> bool:
        """Whether somebody has left it."""
        return (Path(self.folder) / name).exists()

    def ask(self, what: str) -> None:
        """Asks the lab's owner for something, and waits until it is done."""
        self.say(what)
        self.wait(f"{what}.done")

    def hear(self, name: str, within_s: float = PATIENCE_S) -> str:
        """Waits for a note and returns its text."""
        self.wait(name, within_s)
        return (Path(self.folder) / name).read_text()

    def wait(self, name: str, within_s: float = PATIENCE_S) -> None:
        """Waits for a note; needs no file descriptor."""
        end = time.monotonic() + within_s
        while not self.said(name):
            if self.said("stop"):
                raise TimeoutError(f"{name}: the row is over before that was said")
            if time.monotonic() > end:
                raise TimeoutError(f"expected somebody to say {name!r} within {within_s:g} s, nobody did")
            time.sleep(0.003)

    def wait_all(self, name: str, ranks: Iterable[int]) -> None:
        """Waits for the note of each of some ranks."""
        for rank in ranks:
            self.wait(f"{name}{rank}")
