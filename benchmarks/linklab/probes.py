"""Plain sockets on a lab's hosts, without torch: what a link gives to anybody. Run as a program inside a host.

python -m linklab.probes …
serve ADDRESS            answers one probe after the other until it is ended
stream ADDRESS BYTES     a TCP stream to ADDRESS; prints its goodput there in bit/s, the start left out
echo ADDRESS COUNT       round trips of small datagrams; prints the median in seconds
loss ADDRESS COUNT       small datagrams that nobody answers; prints how many arrived
exchange ADDRESS BYTES   BYTES both ways at once, to and from ADDRESS; prints the bit/s of each way
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import struct
import sys
import threading
import time

from linklab import raw

PORT = 29400
DATAGRAM_FRAME = 43  # Ethernet 14, IPv4 20, UDP 8, a byte
_PIECE = 1 << 18
_CONNECT_S = 20
_SILENCE_S = 30
_MARK = struct.Struct("!d")


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
    """TCP: a kind and a number, then what the kind is. UDP: counts what comes, and returns each datagram that says so."""
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    udp.bind((address, PORT))
    counted = [0]

    def datagrams() -> None:
        while True:
            data, sender = udp.recvfrom(2048)
            if data[:1] == b"e":
                udp.sendto(data, sender)
            else:
                counted[0] += 1

    threading.Thread(target=datagrams, daemon=True).start()
    with socket.create_server((address, PORT)) as server:
        while True:
            conn, _ = server.accept()
            # A probe that was killed is no reason to stop serving the next.
            with conn, contextlib.suppress(EOFError, ConnectionError, TimeoutError):
                conn.settimeout(_SILENCE_S)
                kind, number = struct.unpack("!cQ", receive_exactly(conn, 9))
                if kind == b"s":
                    _serve_stream(conn, number)
                elif kind == b"x":
                    raw.exchange([(conn, number)])
                    conn.sendall(_MARK.pack(0))
                else:
                    conn.sendall(_MARK.pack(counted[0]))


def stream(address: str, total: int) -> float:
    """Bit/s of a stream's own bytes as they arrive."""
    with connect(address) as sock:
        sock.sendall(struct.pack("!cQ", b"s", total))
        piece = memoryview(bytes(_PIECE))
        sent = 0
        while sent < total:
            sent += sock.send(piece[: total - sent])
        return _MARK.unpack(receive_exactly(sock, _MARK.size))[0]


def exchange(address: str, total: int) -> float:
    """Bit/s of each way while both are busy: the most that any exchange of equal bytes can have."""
    with connect(address) as sock:
        sock.sendall(struct.pack("!cQ", b"x", total))
        start = time.perf_counter()
        raw.exchange([(sock, total)])
        receive_exactly(sock, _MARK.size)  # what we sent is there, and not in a buffer of ours
        return total * 8 / (time.perf_counter() - start)


def echo(address: str, count: int) -> float:
    """The median round trip, seconds."""
    connect(address).close()  # the server is up
    seconds = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(1)
        sock.connect((address, PORT))
        for number in range(count):
            message = b"e" + struct.pack("!Q", number)
            start = time.perf_counter()
            sock.send(message)
            with contextlib.suppress(TimeoutError):  # lost: links may lose
                while sock.recv(64) != message:
                    pass
                seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _count(address: str) -> int:
    with connect(address) as sock:
        sock.sendall(struct.pack("!cQ", b"c", 0))
        return int(_MARK.unpack(receive_exactly(sock, _MARK.size))[0])


def loss(address: str, count: int, gap_us: int) -> int:
    """How many of `count` datagrams arrive (frames of DATAGRAM_FRAME bytes), at least gap_us apart."""
    before = _count(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((address, PORT))
        for _ in range(count):
            sock.send(b"l")
            time.sleep(gap_us * 1e-6)
    time.sleep(0.2)  # the last has come by when the question that follows it has; the thread that counts it may not
    return _count(address) - before


if __name__ == "__main__":
    command, address, *rest = sys.argv[1:]
    if command == "serve":
        serve(address)
    else:
        print({"stream": stream, "exchange": exchange, "echo": echo, "loss": loss}[command](address, *map(int, rest)))
