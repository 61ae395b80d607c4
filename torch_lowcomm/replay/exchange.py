"""How machines come to the record of an iteration: alone, in a static group, or at a store (store_exchange.py)."""

from __future__ import annotations

import struct
import time
from typing import Any, Protocol

import torch
import torch.distributed as dist

from torch_lowcomm import _C
from torch_lowcomm._all_gather_json import all_gather_json
from torch_lowcomm.groups import exact

_STEP = struct.Struct("<ff")  # learning rate and weight decay, before each message of a static group


class Exchange(Protocol):
    """What an optimizer asks of whoever brings machines together.

    Attributes:
        machine: This machine's id, below 2^64 and no other's.
    """

    machine: int

    def join(self, core: _C.SeedReplay) -> None:
        """Before the first iteration: agrees on `core.agreement`, brings `core` to where the others are.

        Raises:
            ValueError: The others run something else.
        """

    def exchange(self, core: _C.SeedReplay, message: bytes, *, lr: float, weight_decay: float) -> bytes:
        """The record of `core.iteration`, the same on all machines; the caller applies it.

        A machine that the others went on without is brought to their iteration first: `core` has moved then.
        """

    def check(self, core: _C.SeedReplay) -> bool:
        """Compares checksums with another machine; whether the weights were set anew.

        Raises:
            RuntimeError: They differ.
        """

    def leave(self) -> None:
        """Ends this machine's part. Any number of times."""

    def stats(self) -> dict[str, Any]:
        """`machines` of the last record, `sent_bytes` and `received_bytes` of messages and records, `waited_s`."""


class Alone:
    """One machine."""

    def __init__(self, machine: int = 0) -> None:
        self.machine = machine

    def join(self, core: _C.SeedReplay) -> None:
        """There is nobody to agree with."""

    def exchange(self, core: _C.SeedReplay, message: bytes, *, lr: float, weight_decay: float) -> bytes:
        """The record of one message."""
        return core.record([message], lr=lr, weight_decay=weight_decay)

    def check(self, core: _C.SeedReplay) -> bool:
        """There is nobody to compare with."""
        return False

    def leave(self) -> None:
        """Nothing to end."""

    def stats(self) -> dict[str, Any]:
        """As Exchange.stats."""
        return {"machines": 1, "sent_bytes": 0, "received_bytes": 0, "waited_s": 0.0}


class StaticExchange:
    """A group whose ranks are the machines: one all_gather an iteration. Who fails ends the run; no one comes.

    Args:
        group: Of any backend that gathers bytes; None for the default group. Ids are its ranks.
        samples: Of this rank in every iteration; None where their number changes. Unless it is the same on all ranks, the
            lengths of messages are gathered before them.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, samples: int | None) -> None:
        self._group, self._samples, self._fixed = group, samples, False
        self.machine = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self._sent = self._received = 0
        self._waited_s = 0.0

    def join(self, core: _C.SeedReplay) -> None:
        """All ranks are at one iteration, with the same weights and options.

        Raises:
            ValueError: A rank is not: all raise it.
        """
        mine = (core.agreement, core.iteration, core.checksum(), self._samples)
        all_have = all_gather_json(mine, self._group)
        for name, place in (("options and parameters", 0), ("iteration", 1), ("checksum of the weights", 2)):
            values = [have[place] for have in all_have]
            other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
            if other is not None:
                raise ValueError(
                    f"SeedReplay: {name}: expected the same on all ranks, got {' and '.join(apart(values[0], values[other]))} on "
                    f"ranks 0 and {other}"
                )
        self._fixed = self._samples is not None and all(have[3] == self._samples for have in all_have)

    def exchange(self, core: _C.SeedReplay, message: bytes, *, lr: float, weight_decay: float) -> bytes:
        """The record of all ranks' messages.

        Raises:
            ValueError: Ranks have different learning rates or weight decays: all raise it.
        """
        begin = time.monotonic()
        mine = torch.frombuffer(bytearray(_STEP.pack(lr, weight_decay) + message), dtype=torch.uint8)
        lengths = [len(mine)] * self._size
        if not self._fixed:
            lengths = self._gathered(torch.tensor([len(mine)])).tolist()
            mine = torch.nn.functional.pad(mine, (0, max(lengths) - len(mine)))
        found = self._gathered(mine).view(self._size, -1)
        self._waited_s += time.monotonic() - begin
        rows = [row[:length].numpy().tobytes() for row, length in zip(found, lengths, strict=True)]
        steps = [_STEP.unpack_from(row) for row in rows]
        other = next((rank for rank, step in enumerate(steps) if step != steps[0]), None)
        if other is not None:
            raise ValueError(
                f"SeedReplay: iteration {core.iteration}: expected one lr and weight decay on all ranks, got {steps[0]} and "
                f"{steps[other]} on ranks 0 and {other}"
            )
        return core.record([row[_STEP.size :] for row in rows], lr=lr, weight_decay=weight_decay)

    def check(self, core: _C.SeedReplay) -> bool:
        """Compares all ranks' checksums."""
        sums = self._gathered(torch.tensor([core.checksum()])).tolist()
        other = next((rank for rank, value in enumerate(sums) if value != sums[0]), None)
        if other is not None:
            raise RuntimeError(
                f"SeedReplay: iteration {core.iteration}: expected equal weights, got CRC-32C {sums[0]:08x} on rank 0 and "
                f"{sums[other]:08x} on rank {other}"
            )
        return False

    def leave(self) -> None:
        """The group is the caller's."""

    def stats(self) -> dict[str, Any]:
        """As Exchange.stats."""
        return {
            "machines": self._size,
            "sent_bytes": self._sent,
            "received_bytes": self._received,
            "waited_s": self._waited_s,
        }

    def _gathered(self, mine: torch.Tensor) -> torch.Tensor:
        found = mine.new_empty(self._size * mine.numel())
        with exact():
            dist.all_gather_into_tensor(found, mine, group=self._group)
        # Of the direct exchange: to every other rank, and from every other rank.
        self._sent += (self._size - 1) * mine.nbytes
        self._received += (self._size - 1) * mine.nbytes
        return found


def apart(a: object, b: object) -> tuple[str, str]:
    """How two values read: of long texts a piece, from a little before where they part."""
    if not (isinstance(a, str) and isinstance(b, str)):
        return str(a), str(b)
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    begin = max(0, a.rfind(" ", 0, at))
    return repr(a[begin : at + 60].strip()), repr(b[begin : at + 60].strip())
