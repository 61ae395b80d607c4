"""How machines come to the record of an iteration: alone, in a static group, or at a store (`store/`)."""

import hashlib
import struct
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_lowcomm import _C
from torch_lowcomm._all_gather_json import all_gather_json
from torch_lowcomm._copies import NotCopied
from torch_lowcomm._text_difference import show_both
from torch_lowcomm._torch_names import all_gather_single
from torch_lowcomm.groups import exact

_STEP = struct.Struct("<ff")  # learning rate and weight decay, before each message of a static group


class ReplayMismatch(RuntimeError):
    """Machines that applied the same records have different weights: something else has written to them."""


class Exchange:
    """The interface between an optimizer and the way in which machines meet.

    Attributes:
        machine: This machine's number, below 2^64 and different from all others.
    """

    machine: int

    def join(self, core: _C.SeedReplay) -> None:
        """Agrees on `core.agreement` before the first iteration, and brings `core` to the others' iteration.

        Raises:
            ValueError: The others run something else.
        """

    def exchange(self, core: _C.SeedReplay, message: bytes, *, lr: float, weight_decay: float) -> bytes:
        """Returns the record of `core.iteration`, equal on all machines; the caller applies it.

        A machine that the others went on without is brought to their iteration first: `core` has moved then.
        """
        raise NotImplementedError

    def check(self, core: _C.SeedReplay) -> bool:
        """Compares checksums with another machine, and returns whether the weights were replaced.

        Raises:
            RuntimeError: They differ.
        """
        return False

    def leave(self) -> None:
        """Ends this machine's part. It may be called any number of times."""

    def stats(self) -> dict[str, Any]:
        """Counts: `machines` of the last record, `sent_bytes` and `received_bytes` of messages and records, `waited_s`."""
        return {"machines": 1, "sent_bytes": 0, "received_bytes": 0, "waited_s": 0.0}


class Alone(Exchange):
    """One machine."""

    def __init__(self, machine: int = 0) -> None:
        self.machine = machine

    def exchange(self, core: _C.SeedReplay, message: bytes, *, lr: float, weight_decay: float) -> bytes:
        """As Exchange.exchange."""
        return core.record([message], lr=lr, weight_decay=weight_decay)


class StaticExchange(NotCopied, Exchange):
    """A group whose ranks are the machines: one all_gather an iteration. A rank that fails ends the run; none can come.

    Args:
        group: A group of any backend that gathers bytes; None for the default group. Machines' numbers are its ranks.
        samples: Number of this rank's samples in every iteration; None if it changes. Unless it is equal on all ranks, the
            lengths of messages are gathered before the messages.
    """

    _instead = "make a new one"

    def __init__(self, group: dist.ProcessGroup | None, *, samples: int | None) -> None:
        self._group, self._samples, self._fixed = group, samples, False
        self.machine = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self._sent = self._received = 0
        self._waited_s = 0.0

    def join(self, core: _C.SeedReplay) -> None:
        """As Exchange.join: compares iteration, weights and options of all ranks, which raise together."""
        mine = (core.agreement, core.iteration, core.checksum(), self._samples)
        all_have = all_gather_json(mine, self._group)
        for name, place in (("options and parameters", 0), ("iteration", 1), ("checksum of the weights", 2)):
            values = [have[place] for have in all_have]
            if other := _first_other(values):
                raise ValueError(
                    f"SeedReplay: {name}: expected the same on all ranks, got {show_both(values[0], values[other])} on "
                    f"ranks 0 and {other}"
                )
        self._fixed = self._samples is not None and all(have[3] == self._samples for have in all_have)

    def exchange(self, core: _C.SeedReplay, message: bytes, *, lr: float, weight_decay: float) -> bytes:
        """Returns the record of all ranks' messages.

        Raises:
            ValueError: Ranks have different learning rates or weight decays; all ranks raise it.
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
        if other := _first_other(steps):
            raise ValueError(
                f"SeedReplay: iteration {core.iteration}: expected one lr and weight decay on all ranks, got {steps[0]} and "
                f"{steps[other]} on ranks 0 and {other}"
            )
        return core.record([row[_STEP.size :] for row in rows], lr=lr, weight_decay=weight_decay)

    def check(self, core: _C.SeedReplay) -> bool:
        """Compares all ranks' checksums."""
        sums = self._gathered(torch.tensor([core.checksum()])).tolist()
        if other := _first_other(sums):
            raise RuntimeError(
                f"SeedReplay: iteration {core.iteration}: expected equal weights, got CRC-32C {sums[0]:08x} on rank 0 and "
                f"{sums[other]:08x} on rank {other}"
            )
        return False

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
            all_gather_single(found, mine, group=self._group)
        # As in a direct exchange: to every other rank, and from every other rank.
        self._sent += (self._size - 1) * mine.nbytes
        self._received += (self._size - 1) * mine.nbytes
        return found


def _first_other(values: Sequence[Any]) -> int:
    """The first place whose value is not that of place 0; 0 where all are equal."""
    return next((place for place, value in enumerate(values) if value != values[0]), 0)


def machine_number(machine_id: int | str) -> int:
    """Returns the 64-bit number of a machine in messages and directions.

    A number stands for itself. The number of a text is the first 8 bytes of its SHA-256, little-endian.

    Raises:
        TypeError: The id is neither a number nor a text.
        ValueError: The number has more than 64 bits, or is 2^64 - 1, which is no machine's; or the text is empty.
    """
    if isinstance(machine_id, str):
        if not machine_id:
            raise ValueError("SeedReplay: machine_id: expected a text that is not empty, got ''")
        return int.from_bytes(hashlib.sha256(machine_id.encode()).digest()[:8], "little")
    if not isinstance(machine_id, int) or isinstance(machine_id, bool):
        raise TypeError(f"SeedReplay: machine_id: expected an int or a str, got {type(machine_id).__name__}")
    if not 0 <= machine_id < 2**64 - 1:
        raise ValueError(f"SeedReplay: machine_id: expected 0 to 2^64 - 2, got {machine_id}")
    return machine_id
