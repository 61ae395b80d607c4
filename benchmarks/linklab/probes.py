"""Plain TCP on a lab's hosts, without torch: what a link gives to anybody. Run as a program inside a host.

python -m linklab.probes …
serve ADDRESS            answers one probe after the other until it is ended
stream ADDRESS BYTES     a stream to ADDRESS; prints its goodput there in bit/s, the start left out
echo ADDRESS COUNT       round trips of a byte; prints the median in seconds
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import struct
import sys
import time

PORT = 29400
_PIECE = 1 << 18
_CONNECT_S = 20
_SILENCE_S = 30
_MARK = struct.Struct("!d")
_REQUEST = struct.Struct("!cQ")


def connect(address: str) -> socket.socket:
    """A connection to the server, which may start later than we do."""
    end = time.monotonic() + _CONNECT_S
    while True:
        try:
            sock = socket.create_connection((address, PORT), timeout=_SILENCE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """`size` bytes; EOFError when the peer ends before."""
    parts = b""
    while len(parts) < size:
        part = sock.recv(size - len(parts))
        if not part:
            raise EOFError(f"expected {size} bytes, got {len(parts)}")
        parts += part
    return parts


def _serve_stream(conn: socket.socket, total: int) -> None:
    """Reads it; the rate from when a quarter had come and was read, so that bursts are spent, to the end."""
    buffer = bytearray(_PIECE)
    got = 0
    first: tuple[float, int] | None = None
    while got < total:
        got += (size := conn.recv_into(buffer))
        if size == 0:
            raise EOFError(f"expected {total} bytes, got {got}")
        drained = size < len(buffer) or got >= total // 2
        if first is None and got >= total // 4 and drained:
            first = (time.perf_counter(), got)
    assert first
    conn.sendall(_MARK.pack((got - first[1]) * 8 / (time.perf_counter() - first[0])))


def serve(address: str) -> None:
    """A kind and a number, then what the kind is."""
    with socket.create_server((address, PORT)) as server:
        while True:
            conn, _ = server.accept()
            # A probe that was killed is no reason to stop serving the next.
            with conn, contextlib.suppress(EOFError, ConnectionError, TimeoutError):
                conn.settimeout(_SILENCE_S)
                conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                kind, number = _REQUEST.unpack(receive_exactly(conn, _REQUEST.size))
                if kind == b"s":
                    _serve_stream(conn, number)
                for _ in range(number if kind == b"e" else 0):
                    conn.sendall(receive_exactly(conn, 1))


def stream(address: str, total: int) -> float:
    """Bit/s of a stream's own bytes as they arrive."""
    with connect(address) as sock:
        sock.sendall(_REQUEST.pack(b"s", total))
        piece = memoryview(bytes(_PIECE))
        sent = 0
        while sent < total:
            sent += sock.send(piece[: total - sent])
        return _MARK.unpack(receive_exactly(sock, _MARK.size))[0]


def echo(address: str, count: int) -> float:
    """The median round trip, seconds."""
    seconds = []
    with connect(address) as sock:
        sock.sendall(_REQUEST.pack(b"e", count))
        for _ in range(count):
            start = time.perf_counter()
            sock.sendall(b"e")
            receive_exactly(sock, 1)
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    command, address, *rest = sys.argv[1:]
    if command == "serve":
        serve(address)
    else:
        print({"stream": stream, "echo": echo}[command](address, *map(int, rest)))
