"""A rank's plain connections, spoken from csrc/wire/FORMAT_TCP.md: hellos, pieces and records."""

import queue
import random
import socket
import struct
import threading
import time

from torch._C._distributed_c10d import Store

from format_reader.frame import crc32c
from format_reader.refusal import insist

UNKNOWN, CARRIES = 1, 2  # flags of a hello
MESSAGE, DELIVERED, OFFERED, WANTED, BODY = range(5)  # kinds of records
DEADLINE_S = 30.0
_HEARTBEAT_S = 0.25
_CONNECTIONS = 2**32 - 3  # the tag of how many connections a bulk lane has


def hello(group: bytes, source: int, sink: int, channel: int = 0, incarnation: int = 0, received: int = 0) -> bytes:
    """The 64 bytes of one that is to carry the channel."""
    text = b"\nlowcom1" + struct.pack("<I16sIIIQQB3x", 1, group, source, sink, channel, incarnation, received, CARRIES)
    return text + struct.pack("<I", crc32c(text))


def piece(body: bytes, received: int = 0) -> bytes:
    """A header and bytes of the stream."""
    return struct.pack("<IIQ", len(body), 0, received) + body


def record(kind: int, tag: int, number: int, size: int) -> bytes:
    """A record's 24 bytes."""
    return struct.pack("<IIQQ", kind, tag, number, size)


def received(connection: socket.socket, size: int) -> bytes:
    """So many bytes; fewer where the connection ends."""
    got = bytearray()
    while len(got) < size:
        try:
            part = connection.recv(size - len(got))
        except OSError:
            break
        if not part:
            break
        got += part
    return bytes(got)


class Channel:
    """A channel on a connection whose hellos were exchanged. A message is delivered here when it has come."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.settimeout(None)
        self._lock = threading.Lock()
        self._come = self._number = 0
        self._delivered: dict[int, threading.Event] = {}
        self._messages: dict[int, queue.SimpleQueue[bytes | None]] = {}
        self._offered: dict[int, int] = {}  # tags, by number
        self._ended = threading.Event()
        for part in (self._read, self._beat):
            threading.Thread(target=part, daemon=True).start()

    def send(self, tag: int, data: bytes) -> threading.Event:
        """Sends a message; the event is set once it is delivered."""
        with self._lock:
            number = self._number
            self._number += 1
            delivered = self._delivered[number] = threading.Event()
            self._write(record(MESSAGE, tag, number, len(data)), data)
        return delivered

    def receive(self, tag: int) -> bytes:
        """The next message of the tag.

        Raises:
            ConnectionError: The channel has ended.
            queue.Empty: None has come within the deadline.
        """
        waiting = self._of(tag)
        if self._ended.is_set():
            waiting.put(None)  # behind what has come before the end
        message = waiting.get(timeout=DEADLINE_S)
        if message is None:
            waiting.put(None)
            raise ConnectionError("the channel has ended")
        return message

    def _of(self, tag: int) -> queue.SimpleQueue[bytes | None]:
        """The queue of a tag: one for both threads, which a defaultdict would not promise."""
        return self._messages.setdefault(tag, queue.SimpleQueue())

    def close(self) -> None:
        """Ends the channel: the peer gets a piece that says so."""
        with self._lock:
            if not self._ended.is_set():
                self._connection.sendall(struct.pack("<IIQ", 0, 1, self._come))
        self._ended.set()
        self._connection.close()

    def _write(self, *parts: bytes) -> None:
        whole = b"".join(parts)
        for at in range(0, len(whole), 65536):
            self._connection.sendall(piece(whole[at : at + 65536], self._come))

    def _beat(self) -> None:
        while not self._ended.wait(_HEARTBEAT_S):
            with self._lock:
                try:
                    self._connection.sendall(piece(b"", self._come))
                except OSError:
                    return

    def _read(self) -> None:
        stream = bytearray()
        while True:
            header = received(self._connection, 16)
            size, flags, _ = struct.unpack("<IIQ", header) if len(header) == 16 else (0, 1, 0)
            stream += received(self._connection, size)
            self._come += size
            if flags & 1:
                break
            self._take(stream)
        self._ended.set()
        for waiting in (*self._messages.values(),):
            waiting.put(None)
        for event in (*self._delivered.values(),):
            event.set()

    def _take(self, stream: bytearray) -> None:
        """Takes whole records, with their bodies, from the stream's beginning."""
        while len(stream) >= 24:
            kind, tag, number, size = struct.unpack_from("<IIQQ", stream)
            body = size if kind in (MESSAGE, BODY) else 0
            if len(stream) < 24 + body:
                return
            data = bytes(stream[24 : 24 + body])
            del stream[: 24 + body]
            if kind == OFFERED:
                self._offered[number] = tag
            if kind in (MESSAGE, BODY):
                self._of(tag if kind == MESSAGE else self._offered.pop(number)).put(data)
            if kind in (MESSAGE, BODY, OFFERED):
                with self._lock:
                    self._write(record(WANTED if kind == OFFERED else DELIVERED, 0, number, 0))
            elif kind == DELIVERED:
                self._delivered[number].set()


class Lanes:
    """The channels of a rank to its peers, all of which it dials: `control` and `bulk`, by peer."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.control: dict[int, Channel] = {}
        self.bulk: dict[int, Channel] = {}
        incarnation = random.getrandbits(64)
        store.set(f"lowcomm/tcp/{rank}", f"{incarnation} plain rate")  # no address: nobody can dial it
        group = store.get("lowcomm/tcp/group")
        for peer in (other for other in range(size) if other != rank):
            _, _, congestion, *addresses = store.get(f"lowcomm/tcp/{peer}").decode().split(" ")

            def channel(number: int, peer: int = peer, addresses: list[str] = addresses) -> Channel:
                return Channel(_connect(addresses, hello(group, rank, peer, number, incarnation)))

            self.control[peer] = channel(0)
            if size > 2 or congestion == "loss":
                agreed = self.control[peer].receive(_CONNECTIONS)  # this rank is the higher one
                insist(agreed == struct.pack("<I", 1), f"one connection for bulk data to a near peer, got {agreed!r}")
            self.bulk[peer] = channel(1)

    def close(self) -> None:
        """Ends all channels."""
        for channel in (*self.control.values(), *self.bulk.values()):
            channel.close()


def _connect(addresses: list[str], greeting: bytes) -> socket.socket:
    """A connection to the first address that takes one and answers; again until the peer has made its part of the group."""
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        for address in addresses:
            host, _, port = address.rpartition(":")
            try:
                connection = socket.create_connection((host.strip("[]"), int(port)), timeout=DEADLINE_S)
                connection.sendall(greeting)
            except OSError:
                continue
            answer = received(connection, 64)
            if len(answer) == 64 and answer[56] & UNKNOWN == 0:
                return connection
            connection.close()
        time.sleep(0.02)
    raise ConnectionError(f"none of {addresses} answers")
