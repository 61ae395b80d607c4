"""Crowds at a rank's port, from its own host, so that they cost it no byte of its link: many at once, and slow ones."""

from __future__ import annotations

import collections
import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Iterator

from linklab.tools import ip

from faults.stage import PORT, enter, inside

_ADDRESSES = [f"10.78.0.{i}" for i in range(1, 41)]  # a crowd's, on the host's loopback
_OPEN = 150  # connections that a crowd holds at a time
_CLIENT_HELLO = b"\x16\x03\x01\x01\x00\x01\x00\x00\xfc\x03\x03"


def _dial(to: str, number: int) -> socket.socket | None:
    one = socket.socket()
    one.setblocking(False)
    try:
        one.bind((_ADDRESSES[number % len(_ADDRESSES)], 0))
        one.connect_ex((to, PORT))
    except OSError:
        one.close()
        return None
    return one


def _come(namespace: str) -> None:
    for address in _ADDRESSES:
        ip("address", "replace", f"{address}/32", "dev", "lo", inside=namespace)


def strangers(namespace: str, to: str, count: int, seconds: float) -> int:
    """Makes connections to a rank, evenly, of which a third each is silent, says garbage, or begins as TLS does. Returns how
    many.
    """

    def make() -> int:
        held: collections.deque[socket.socket] = collections.deque()
        began, made = time.monotonic(), 0
        for number in range(count):
            time.sleep(max(0.0, began + seconds * number / count - time.monotonic()))
            if (one := _dial(to, number)) is None:
                continue
            made += 1
            said = (b"", secrets.token_bytes(200), _CLIENT_HELLO + bytes(150))[number % 3]
            with contextlib.suppress(OSError):
                one.send(said)
            held.append(one)
            if len(held) > _OPEN:
                held.popleft().close()
        for one in held:
            one.close()
        return made

    _come(namespace)
    return inside(namespace, make)


@contextlib.contextmanager
def loris(namespace: str, to: str, count: int, seconds: float, words: bytes) -> Iterator[None]:
    """Within, and for some seconds, strangers say `words` a byte every 0.2 s; who is let go comes again."""
    over = threading.Event()

    def speak() -> None:
        enter(namespace)
        slow: list[tuple[socket.socket | None, int]] = [(None, 0)] * count
        end = time.monotonic() + seconds
        while time.monotonic() < end and not over.wait(0.2):
            for number, (one, said) in enumerate(slow):
                if one is None:
                    slow[number] = (_dial(to, number), 0)
                    continue
                try:
                    one.send(words[said % len(words) :][:1])
                    slow[number] = (one, said + 1)
                except BlockingIOError:
                    pass
                except OSError:
                    one.close()
                    slow[number] = (None, 0)
        for one, _ in slow:
            if one:
                one.close()

    _come(namespace)
    thread = threading.Thread(target=speak)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
