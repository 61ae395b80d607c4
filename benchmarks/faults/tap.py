"""Stands between one rank and its peers, on the connections that carry lowcomm's frames, and acts at one of its frames.

The rank's library gets a lane whose other ends are all here, in its own process; what it sends is passed on over the real
lane, frame by frame, and what comes back likewise. So both sides are the library as it is, and nobody knows. Passing on is
per peer: where one side of it closes, the other is closed.
"""

from __future__ import annotations

import contextlib
import copy
import struct
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

Frame = torch.Tensor  # uint8, header and payload
HEADER, SEQUENCE_AT, EPOCH_AT, SIZE_AT, CRC_AT = 64, 32, 36, 56, 60
_ROOM = 1 << 18  # of a frame
_LONG = timedelta(hours=1)  # deadlines are the library's, on either side
_COLLECTIVES, _MESSAGES = 0, 1 << 30  # the transport's tags: of collectives, of messages with tag 0
_NOBODYS = 1 << 29


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli)."""
    from torch_lowcomm import _C

    return _C.crc32c(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def corrupted(frame: Frame) -> list[Frame]:
    """One bit of the payload is another."""
    frame = frame.clone()
    frame[HEADER + (frame.numel() - HEADER) // 2] ^= 0x10
    return [frame]


def truncated(frame: Frame) -> list[Frame]:
    """Its second half is missing."""
    return [frame[: HEADER + (frame.numel() - HEADER) // 2].clone()]


def duplicated(frame: Frame) -> list[Frame]:
    """It comes twice."""
    return [frame, frame.clone()]


def older_epoch(frame: Frame) -> list[Frame]:
    """Whole, and of a group that was given up before."""
    raw = bytearray(frame.numpy().tobytes())
    (epoch,) = struct.unpack_from("<I", raw, EPOCH_AT)
    struct.pack_into("<I", raw, EPOCH_AT, (epoch - 1) % 2**32)
    struct.pack_into("<I", raw, CRC_AT, crc32c(bytes(raw[:CRC_AT] + raw[HEADER:])))
    return [torch.frombuffer(raw, dtype=torch.uint8)]


SPOILT: dict[str, Callable[[Frame], list[Frame]]] = {
    "corrupted": corrupted,
    "truncated": truncated,
    "duplicated": duplicated,
    "older epoch": older_epoch,
}


class Tap:
    """Passes frames on for one rank. It does nothing else until `arm`."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(range(size), 0)
        self._at: dict[int, int] = {}
        self._act: Callable[[Frame], list[Frame]] | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Groups made inside have their bulk lane tapped."""
        from torch_lowcomm import _create

        make = _create.make_gloo

        def tapped(store: Any, rank: int, size: int, of: Any, connections: int | None) -> Any:
            made = make(store, rank, size, of, connections)
            if connections is None:
                return made
            store.set(f"tap{rank}", "")  # under the lane's prefix, which does not tell its name otherwise
            if not store.underlying_store.check([f"lowcomm/lane/bulk/lane/tap{rank}"]):
                return made
            return self._open(make, made, size, of, connections)

        _create.make_gloo = tapped
        try:
            yield
        finally:
            _create.make_gloo = make

    def count(self) -> dict[int, int]:
        """Frames passed on to each peer since the last call."""
        with self._lock:
            counts, self._counts = self._counts, dict.fromkeys(range(self._size), 0)
        return counts

    def arm(self, counts: dict[int, int], when: str, act: Callable[[Frame], list[Frame]]) -> None:
        """From now on acts at one frame of the next op: its first, a middle one, its last.

        Args:
            counts: Frames of such an op to each peer, as `count` gave them; it acts on what goes to those who get most.
            when: before, during, after.
            act: Gets the frame and says what to send instead.
        """
        most = max(counts.values())
        at = {"before": 0, "during": most // 2, "after": most - 1}[when]
        self.count()
        with self._lock:
            self._at = {peer: at for peer, n in counts.items() if n == most}
            self._act = act

    def _outgoing(self, peer: int, frame: Frame) -> list[Frame]:
        with self._lock:
            number = self._counts[peer]
            self._counts[peer] += 1
            act = self._act if self._at.get(peer) == number else None
            if act:
                del self._at[peer]
        return act(frame) if act else [frame]

    def _open(self, make: Callable[..., Any], real: Any, size: int, of: Any, connections: int) -> Any:
        inside = dist.HashStore()
        patient = copy.copy(of)
        patient._timeout = _LONG
        ends: dict[int, Any] = {}

        def end(rank: int) -> None:
            ends[rank] = make(dist.PrefixStore("lane", inside), rank, size, patient, connections)

        threads = [threading.Thread(target=end, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for peer in range(size):
            if peer != self._rank:
                _Link(self, peer, self._rank, real, ends[peer]).start()
        return ends[self._rank]


class _Link:
    """To one peer: four threads, a direction and a tag each."""

    def __init__(self, tap: Tap, peer: int, rank: int, real: Any, end: Any) -> None:
        self._tap, self._peer, self._rank = tap, peer, rank
        self._real, self._end = real, end

    def start(self) -> None:
        for tag in (_COLLECTIVES, _MESSAGES):
            for pass_on in (self._out, self._in):
                threading.Thread(target=self._until_closed, args=(pass_on, tag), daemon=True).start()

    def _until_closed(self, pass_on: Callable[[int], None], tag: int) -> None:
        try:
            while True:
                pass_on(tag)
        except _ConnectionClosed as closed:
            # A peer that is gone is gone for this rank; a rank that has given its lane up has done so for all peers.
            if closed.lane is self._real:
                _hang_up(self._end, self._rank)
            else:
                _hang_up(self._real, self._peer)

    def _out(self, tag: int) -> None:
        for frame in self._tap._outgoing(self._peer, _receive(self._end, self._rank, tag)):
            _do(self._real, "send", frame, self._peer, tag)

    def _in(self, tag: int) -> None:
        _do(self._end, "send", _receive(self._real, self._peer, tag), self._rank, tag)


class _ConnectionClosed(Exception):
    def __init__(self, lane: Any) -> None:
        self.lane = lane


def _do(lane: Any, what: str, tensor: torch.Tensor, peer: int, tag: int) -> None:
    try:
        getattr(lane, what)([tensor], peer, tag).wait(_LONG)
    except RuntimeError:
        raise _ConnectionClosed(lane) from None


def _receive(lane: Any, source: int, tag: int) -> Frame:
    buffer = torch.zeros(_ROOM, dtype=torch.uint8)
    _do(lane, "recv", buffer, source, tag)
    (size,) = struct.unpack_from("<I", buffer[SIZE_AT:CRC_AT].numpy().tobytes())
    return buffer[: HEADER + size].clone()


def _hang_up(lane: Any, peer: int) -> None:
    """Closes all of a lane's connections: gloo has no other way than a wait that runs out."""
    with contextlib.suppress(RuntimeError):
        lane.recv([torch.zeros(1, dtype=torch.uint8)], peer, _NOBODYS).wait(timedelta(milliseconds=1))
