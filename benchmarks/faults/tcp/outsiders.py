"""Processes that are no ranks but know what can be heard: bytes of connections, said again, changed, or to another."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import defaultdict
from types import TracebackType

import torch
from linklab import Lab

from faults.stage import PORT, enter, inside
from torch_lowcomm import _C

_ALL = 0x0003  # ETH_P_ALL: what leaves, too
_SO_RCVBUFFORCE = 33  # Linux; root may ask for more than net.core.rmem_max
_KEPT = 16 << 10  # bytes of the beginning of a flow
_BUFFER = 16 << 20  # bytes of packets, for a thread that a busy machine keeps waiting
_PATIENCE_S = 5.0  # a stranger has 3 s
HELLO, IDENTITY = b"\nlowcom1", b"\nlowtls1"  # csrc/wire/FORMAT.md, TCP
_TLS_HANDSHAKE = 0x16
_UNKNOWN, _CARRIES = 1, 2

Flow = tuple[str, int, str, int]


class Ears:
    """Hears the beginning of each connection to or from the ranks' port on some hosts; a context manager."""

    def __init__(self, namespaces: list[str]) -> None:
        self._flows: dict[Flow, bytearray] = defaultdict(bytearray)
        self._over = threading.Event()
        self._ready = threading.Barrier(len(namespaces) + 1)
        self._threads = [threading.Thread(target=self._hear, args=(one,)) for one in namespaces]

    def __enter__(self) -> Ears:
        for thread in self._threads:
            thread.start()
        self._ready.wait()  # a connection that is made from now on is heard from its beginning
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Listens no more; what was heard stays."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _hear(self, namespace: str) -> None:
        enter(namespace)
        with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ALL)) as line:
            line.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER)
            line.bind(("eth0", _ALL))
            self._ready.wait()
            line.settimeout(0.05)
            while not self._over.is_set():
                with contextlib.suppress(TimeoutError):
                    self._take(line.recv(1 << 16))

    def _take(self, packet: bytes) -> None:
        if len(packet) < 40 or packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
            return
        whole = struct.unpack_from(">H", packet, 2)[0]
        segment = packet[4 * (packet[0] & 15) : whole or len(packet)]
        source, sink = struct.unpack_from(">HH", segment)
        if PORT not in (source, sink):
            return
        flow = (socket.inet_ntoa(packet[12:16]), source, socket.inet_ntoa(packet[16:20]), sink)
        kept = self._flows[flow]
        if len(kept) < _KEPT:
            kept += segment[4 * (segment[12] >> 4) :]

    def said(self, sink: str) -> bytes:
        """Returns what somebody said first who dialled an address, on the connection of the most bytes."""
        found = [bytes(said) for flow, said in self._flows.items() if flow[2:] == (sink, PORT) and said]
        return max(found, key=len)

    def answered(self, source: str) -> bytes:
        """Returns what an address answered first on such a connection."""
        return next(bytes(said) for flow, said in self._flows.items() if flow[:2] == (source, PORT) and said)

    def beginning(self) -> bytes:
        """Returns the first words of any dial: of a hello, or of a handshake."""
        words = next(bytes(said) for flow, said in self._flows.items() if flow[3] == PORT and said)
        return words[:60]


def hello(group: bytes, source: int, sink: int, channel: int, incarnation: int) -> bytes:
    """A hello that is to carry a channel (FORMAT.md)."""
    text = HELLO + struct.pack("<I16sIIIQQB3x", 1, group, source, sink, channel, incarnation, 0, _CARRIES)
    return text + struct.pack("<I", _C.crc32c(torch.frombuffer(bytearray(text), dtype=torch.uint8)))


def with_group(words: bytes, group: bytes) -> bytes:
    """The same hello of another group."""
    text = words[:12] + group + words[28:60]
    return text + struct.pack("<I", _C.crc32c(torch.frombuffer(bytearray(text), dtype=torch.uint8)))


def talk(namespace: str, to: str, words: bytes) -> tuple[bytes, bool]:
    """Dials a rank from a host and says something; what is answered, and whether the rank then hung up."""

    def call() -> tuple[bytes, bool]:
        answer = b""
        with socket.create_connection((to, PORT), timeout=_PATIENCE_S) as one:
            end = time.monotonic() + _PATIENCE_S
            with contextlib.suppress(ConnectionError, BrokenPipeError):
                one.sendall(words)
                while (left := end - time.monotonic()) > 0:
                    one.settimeout(left)
                    try:
                        got = one.recv(4096)
                    except TimeoutError:
                        return answer, False
                    if not got:
                        break
                    answer += got
        return answer, time.monotonic() < end

    return inside(namespace, call)


def impostor(fault: str, ears: Ears, lab: Lab, namespace: str, last: int) -> list[str]:
    """Pretends to be a rank, or says to one what it has heard; reasons why that was not refused."""
    to = lab.address(0)
    heard = ears.said(to)
    secret = heard[0] == _TLS_HANDSHAKE
    at = heard.find(IDENTITY)
    group = heard[at + 8 : at + 24] if secret else heard[12:28]
    other = bytes(byte ^ 0x55 for byte in group)
    if fault == "no secret":
        words = hello(group, last, 0, 1, struct.unpack_from("<Q", heard, at + 36)[0])
    elif fault == "wrong secret":
        words = _client_hello(heard)
        words = words[:-1] + bytes([words[-1] ^ 1])  # of the binder, which only who has the key can make
    elif fault == "another group's":
        words = _client_hello(heard).replace(group, other) if secret else with_group(heard[:64], other)
    elif fault == "replayed":
        words = heard
    elif secret:  # reflected: to the rank that has said it
        words, to = _client_hello(ears.said(to)), _dialler(ears, to)
    else:
        words = ears.answered(to)[:64]
    answer, hung_up = talk(namespace, to, words)
    reasons = [] if hung_up else [f"{fault}: expected the rank to hang up, it has not"]
    if secret:
        began = answer[:1] == bytes([_TLS_HANDSHAKE])
        if fault != "replayed" and began:
            reasons.append(f"{fault}: expected no handshake, got {len(answer)} bytes of one")
        if len(answer) > 1024:
            reasons.append(f"{fault}: expected no more than a handshake's beginning, got {len(answer)} bytes")
    elif len(answer) != 64 or answer[:8] != HELLO or answer[56] & (_UNKNOWN | _CARRIES) != _UNKNOWN:
        reasons.append(
            f"{fault}: expected a hello that says the group is unknown, got {answer[:64].hex() or 'nothing'}"
        )
    return reasons


def _client_hello(heard: bytes) -> bytes:
    """The first record."""
    return heard[: 5 + struct.unpack_from(">H", heard, 3)[0]]


def _dialler(ears: Ears, to: str) -> str:
    """The address that said most to another."""
    return max((flow for flow in ears._flows if flow[2:] == (to, PORT)), key=lambda flow: len(ears._flows[flow]))[0]
