"""Plain TCP connections between ranks, with a deadline on progress."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import struct
import time
from pathlib import Path

_SIOCGIFADDR = 0x8915  # of Linux
_TOKEN_BYTES = 16
Address = tuple[str, int, str]  # IPv4 or IPv6, port, and what a caller must show


class Connection(contextlib.AbstractContextManager):
    """A TCP connection to one rank. Every wait ends after `timeout_s` without a byte, as a ConnectionError."""

    def __init__(self, made: socket.socket, rank: int, peer: int, timeout_s: float) -> None:
        self._socket, self._rank, self._peer = made, rank, peer
        self._sent = self._received = 0
        self.patience(timeout_s)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def to(cls, address: Address, rank: int, peer: int, timeout_s: float) -> Connection:
        """Connects to a listening rank and tells it this rank's number."""
        host, port, token = address
        try:
            made = cls(socket.create_connection((host, port), timeout_s), rank, peer, timeout_s)
        except OSError as error:
            raise ConnectionError(f"rank {rank} expected rank {peer} to listen on {host}:{port}: {error}") from error
        made.send(bytes.fromhex(token) + struct.pack("<I", rank))
        return made

    def patience(self, timeout_s: float) -> None:
        """Sets how long a wait may last without a byte, in seconds."""
        self._timeout_s = timeout_s
        self._socket.settimeout(timeout_s)

    def send(self, data: bytes) -> None:
        """Sends all of the data."""
        view = memoryview(data)
        while view:
            try:
                sent = self._socket.send(view)
            except OSError as error:
                raise self._failure(f"{len(view)} more bytes to be taken", error) from error
            self._sent += sent
            view = view[sent:]

    def receive(self, size: int) -> bytes:
        """Receives exactly `size` bytes."""
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            try:
                got = self._socket.recv_into(view[done:])
            except OSError as error:
                raise self._failure(f"{size - done} more bytes to come", error) from error
            if got == 0:
                raise self._failure(f"{size - done} more bytes to come", "the connection was closed")
            done += got
            self._received += got
        return bytes(data)

    def _failure(self, expected: str, got: object) -> ConnectionError:
        got = f"no progress for {self._timeout_s:g} s" if isinstance(got, TimeoutError) else got
        return ConnectionError(
            f"rank {self._rank} with rank {self._peer}: expected {expected}, got {got} "
            f"({self._sent} bytes sent, {self._received} received)"
        )

    def __exit__(self, *_: object) -> None:
        self._socket.close()


class Listener(contextlib.AbstractContextManager):
    """A socket of this rank that listens on all interfaces; `port` and `token` are what a peer needs besides an address."""

    def __init__(self, rank: int, port: int, timeout_s: float) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._socket = socket.create_server(("", port), family=family, dualstack_ipv6=both)
        self.port = self._socket.getsockname()[1]
        self.token = secrets.token_hex(_TOKEN_BYTES)

    def accept(self, peer: int) -> Connection:
        """Accepts the connection of `peer` within the deadline; it closes connections of strangers."""
        expected = bytes.fromhex(self.token) + struct.pack("<I", peer)
        end = time.monotonic() + self._timeout_s
        while (left := end - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                made = self._socket.accept()[0]
            except TimeoutError:
                break
            caller = Connection(made, self._rank, peer, left)
            with contextlib.suppress(ConnectionError):
                if secrets.compare_digest(caller.receive(len(expected)), expected):
                    caller.patience(self._timeout_s)
                    return caller
            made.close()
        raise ConnectionError(
            f"rank {self._rank} expected rank {peer} to connect to port {self.port} within {self._timeout_s:g} s, got no "
            "connection"
        )

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def interfaces() -> list[tuple[str, str]]:
    """Returns names of network interfaces with an address each: the IPv4 ones, in the system's order, then the IPv6 ones."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(s.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
                found.append((name, socket.inet_ntoa(answer[20:24])))
    known = Path("/proc/net/if_inet6")
    for line in known.read_text().splitlines() if known.exists() else ():
        number, _, _, scope, _, name = line.split()
        if scope == "00":  # global
            found.append((name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number))))
    return found


def chosen_interface() -> str:
    """Returns the network interface that a group is told to use; empty: none is named."""
    ours, gloo = (os.environ.get(f"{name}_SOCKET_IFNAME", "") for name in ("LOWCOMM", "GLOO"))
    return ours or gloo.split(",")[0]


def host_and_port(text: str, expected: str = "expected HOST:PORT") -> tuple[str, int]:
    """Returns the two parts of HOST:PORT; a ValueError, which says what is expected, for another text."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{expected}, got {text!r}")
    return host, int(port)
