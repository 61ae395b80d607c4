"""A machine of several ranks: one core over their shards, one voice among the machines, one folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch.distributed as dist

from torch_lowcomm import _C
from torch_lowcomm.seed_replay.checkpoint import Checkpoint, Checkpointed
from torch_lowcomm.seed_replay.exchange import Alone, Exchange, StaticExchange
from torch_lowcomm.seed_replay.lead import Lead
from torch_lowcomm.seed_replay.machine_ranks import MachineRanks
from torch_lowcomm.seed_replay.store import StoreExchange
from torch_lowcomm.seed_replay.weights import Entry


class ShardedCore:
    """The core of one rank's shards, with the checksum of the whole weights; all else is the core's own.

    Args:
        core: The core of this rank's shards.
        ranks: The machine's ranks.
        own: This rank's shards.
    """

    def __init__(self, core: _C.SeedReplay, ranks: MachineRanks, own: Sequence[Entry]) -> None:
        self._core, self._ranks = core, ranks
        self._pieces = [(first * shard.element_size(), shard.nbytes) for _, shard, _, first in own]

    def __getattr__(self, name: str) -> Any:
        """The core's attribute."""
        return getattr(self._core, name)

    @property
    def iteration(self) -> int:
        """The iteration that comes next."""
        return self._core.iteration

    @iteration.setter
    def iteration(self, value: int) -> None:
        self._core.iteration = value

    def checksum(self) -> int:
        """Returns the CRC-32C of the whole weights, as an unsharded machine has it. Collective of the machine.

        Raises:
            RuntimeError: Ranks that have the same part of a parameter have different values in it.
        """
        mine = [(*piece, crc) for piece, crc in zip(self._pieces, self._core.checksums(), strict=True)]
        whole = 0
        for number, pieces in enumerate(zip(*self._ranks.gather(mine), strict=True)):
            found: dict[int, tuple[int, int, int]] = {}  # by first byte: bytes, CRC, rank
            for rank, (first, size, crc) in zip(self._ranks.ranks, pieces, strict=True):
                if size and found.setdefault(first, (size, crc, rank))[:2] != (size, crc):
                    raise RuntimeError(
                        f"SeedReplay: iteration {self.iteration}: expected equal weights in parameter {number}, got CRC-32C "
                        f"{found[first][1]:08x} on rank {found[first][2]} and {crc:08x} on rank {rank} of one machine"
                    )
            for _, (size, crc, _) in sorted(found.items()):
                whole = _C.joined_crc32c(whole, crc, size)
        return whole


class LedCore:
    """The machine's core, as the first rank gives it to an exchange: the other ranks follow every change of the weights."""

    def __init__(self, core: ShardedCore, lead: Lead) -> None:
        self._core, self._lead = core, lead

    def __getattr__(self, name: str) -> Any:
        """The first rank's core's attribute."""
        return getattr(self._core, name)

    @property
    def iteration(self) -> int:
        """The iteration that comes next."""
        return self._core.iteration

    def checksum(self) -> int:
        """As `ShardedCore.checksum`."""
        return cast("int", self._lead.tell("checksum", act=self._core.checksum))

    def apply(self, records: bytes) -> int:
        """As the core's, on all ranks."""
        return cast("int", self._lead.tell("apply", data=records, act=lambda: self._core.apply(records)))

    def forget_log(self, *, before: int) -> None:
        """As the core's, on all ranks."""
        self._lead.tell("forget_log", number=before, act=lambda: self._core.forget_log(before=before))


class LedOptimizer:
    """The machine's optimizer, as the first rank gives it to a checkpoint."""

    def __init__(self, optimizer: Checkpointed, core: LedCore, lead: Lead) -> None:
        self._optimizer, self.core, self._lead = optimizer, core, lead

    @property
    def iteration(self) -> int:
        """The iteration that comes next."""
        return self._optimizer.iteration

    def snapshot(self) -> dict[str, Any]:
        """As the optimizer's, on all ranks."""
        return cast("dict[str, Any]", self._lead.tell("snapshot", act=self._optimizer.snapshot))

    def load_snapshot(self, saved: dict[str, Any]) -> None:
        """As the optimizer's, on all ranks."""
        self._lead.tell("load_snapshot", act=lambda: self._optimizer.load_snapshot(saved))

    def replay(self, records: bytes) -> int:
        """As the optimizer's, on all ranks."""
        return cast("int", self._lead.tell("replay", data=records, act=lambda: self._optimizer.replay(records)))


class SeveralRanks:
    """The parts of a machine of several ranks.

    Args:
        optimizer: This rank's optimizer.
        core: The core of this rank's shards.
        own: The shards.
        ranks: The machine's ranks.

    Attributes:
        core: That of the whole machine, for this rank.
        lead: Lets the first rank act, and the others follow it.
        led_core: What the first rank gives to an exchange.
        optimizer: What the first rank gives to a checkpoint.
    """

    def __init__(self, optimizer: Checkpointed, core: _C.SeedReplay, own: Sequence[Entry], ranks: MachineRanks) -> None:
        self.core = ShardedCore(core, ranks, own)
        steps = {
            "checksum": lambda _, __: self.core.checksum(),
            "apply": lambda _, records: self.core.apply(records),
            "forget_log": lambda before, _: self.core.forget_log(before=before),
            "snapshot": lambda _, __: optimizer.snapshot(),
            "load_snapshot": lambda _, __: optimizer.load_snapshot({}),
            "replay": lambda _, records: optimizer.replay(records),
        }
        self.lead = Lead(ranks, steps)
        self.led_core = LedCore(self.core, self.lead)
        self.optimizer = LedOptimizer(optimizer, self.led_core, self.lead)


class MachineExchange:
    """An exchange in which a machine's first rank speaks for all its ranks: one message a machine.

    Args:
        inner: The exchange among machines; None on ranks other than the first.
        several: The machine's parts.
        machine: Number of this machine.
    """

    def __init__(self, inner: Exchange | None, several: SeveralRanks, machine: int) -> None:
        self._inner, self._lead, self.machine, self._there = inner, several.lead, machine, 0
        self._led = cast("_C.SeedReplay", several.led_core)

    def join(self, core: _C.SeedReplay) -> None:
        """As Exchange.join, after a comparison of what several ranks of the machine have. Collective of the machine."""

        def join() -> None:
            self._led.checksum()
            self._of_first.join(self._led)

        self._lead(join)

    def exchange(self, core: _C.SeedReplay, message: bytes, *, lr: float, weight_decay: float) -> bytes:
        """As Exchange.exchange. Collective of the machine."""
        step = {"lr": lr, "weight_decay": weight_decay}
        record = cast("bytes", self._lead(lambda: self._of_first.exchange(self._led, message, **step)))
        self._there = len(_C.read_replay_records(record)[0]["machines"])
        return record

    def check(self, core: _C.SeedReplay) -> bool:
        """As Exchange.check, and compares what several ranks of the machine have. Collective of the machine."""

        def check() -> bool:
            self._led.checksum()
            return self._of_first.check(self._led)

        return cast("bool", self._lead(check))

    def leave(self) -> None:
        """As Exchange.leave; the first rank's counts, and it waits for no other rank."""
        if self._inner is not None:
            self._inner.leave()

    def stats(self) -> dict[str, Any]:
        """As Exchange.stats. Ranks other than the first exchange nothing with other machines."""
        if self._inner is not None:
            return self._inner.stats()
        return {"machines": self._there, "sent_bytes": 0, "received_bytes": 0, "waited_s": 0.0}

    @property
    def _of_first(self) -> Exchange:
        assert self._inner is not None
        return self._inner


class MachineCheckpoint:
    """The folder of a machine of several ranks. The first rank reads and writes it.

    Args:
        inner: The folder; None on ranks other than the first.
        several: The machine's parts.
    """

    def __init__(self, inner: Checkpoint | None, several: SeveralRanks) -> None:
        self._inner, self._led, self._lead = inner, several.optimizer, several.lead

    def restore(self, optimizer: Checkpointed) -> None:
        """As Checkpoint.restore. Collective of the machine."""
        self._lead(lambda: self._of_first.restore(self._led))

    def applied(self, optimizer: Checkpointed) -> None:
        """As Checkpoint.applied. Collective of the machine."""
        self._lead(lambda: self._of_first.applied(self._led))

    def restart(self, optimizer: Checkpointed) -> None:
        """As Checkpoint.restart. Collective of the machine."""
        self._lead(lambda: self._of_first.restart(self._led))

    @property
    def _of_first(self) -> Checkpoint:
        assert self._inner is not None
        return self._inner


def exchange_of(
    group: dist.ProcessGroup | None, store: dist.Store | None, machine_id: int | str | None, *, samples: int | None
) -> Exchange:
    """Returns the way to meet other machines that an optimizer's arguments name: a store, a group, or none.

    Raises:
        ValueError: This rank is not in the group.
    """
    if store is not None and machine_id is not None:
        return StoreExchange(store, machine_id)
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("SeedReplay: group: expected one that this rank is in, got GroupMember.NON_GROUP_MEMBER")
    return Alone() if group is None else StaticExchange(group, samples=samples)
