"""Equal bytes over plain TCP sockets, both ways at once: what no collective over the same connections can beat."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence

_PIECE = 1 << 20


def exchange(peers: Sequence[tuple[socket.socket, int]]) -> None:
    """Sends each peer its number of bytes and receives as many from it, all at once. ConnectionError when one ends."""
    failures: list[BaseException] = []
    with_each = [(_send, *peer) for peer in peers] + [(_receive, *peer) for peer in peers]
    threads = [threading.Thread(target=_guarded, args=(failures, *one)) for one in with_each[1:]]
    for thread in threads:
        thread.start()
    _guarded(failures, *with_each[0])
    for thread in threads:
        thread.join()
    if failures:
        raise ConnectionError(f"raw exchange: {failures[0]}") from failures[0]


def _guarded(failures: list[BaseException], act: Callable[[socket.socket, int], None], *args: object) -> None:
    try:
        act(*args)  # type: ignore[arg-type]
    except BaseException as error:
        failures.append(error)


def _send(sock: socket.socket, size: int) -> None:
    piece = memoryview(bytes(min(size, _PIECE)))
    while size:
        size -= sock.send(piece[:size])


def _receive(sock: socket.socket, size: int) -> None:
    buffer = memoryview(bytearray(min(size, _PIECE)))
    while size:
        got = sock.recv_into(buffer[:size])
        if got == 0:
            raise EOFError(f"the peer ended {size} bytes early")
        size -= got


def mesh(rank: int, addresses: Sequence[str], port: int, timeout_s: float) -> dict[int, socket.socket]:
    """A connection to every other rank: rank -> socket. Called by all of them; `timeout_s` bounds each wait on it later."""
    with socket.create_server((addresses[rank], port)) as server:
        server.settimeout(timeout_s)
        sockets = {}
        for other in range(rank):
            sockets[other] = _connect(addresses[other], port, timeout_s)
            sockets[other].sendall(bytes([rank]))
        for _ in range(rank + 1, len(addresses)):
            conn, _ = server.accept()
            conn.settimeout(timeout_s)
            sockets[conn.recv(1)[0]] = conn
    for sock in sockets.values():
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sockets


def _connect(address: str, port: int, timeout_s: float) -> socket.socket:
    end = time.monotonic() + timeout_s
    while True:
        try:
            return socket.create_connection((address, port), timeout=timeout_s)
        except ConnectionRefusedError:  # it is not listening yet
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
