"""How a machine meets the others, exchanges and keeps its records; one of several ranks has one voice, and one folder."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from torch_lowcomm import _C
from torch_lowcomm._saved import packed, unpacked
from torch_lowcomm.seed_replay.checkpoint import Checkpoint, Checkpointed
from torch_lowcomm.seed_replay.exchange import Alone, Exchange, StaticExchange
from torch_lowcomm.seed_replay.lead import Lead, Led, Steps
from torch_lowcomm.seed_replay.machine_ranks import MachineRanks
from torch_lowcomm.seed_replay.store import StoreExchange


@dataclasses.dataclass(frozen=True)
class Meeting:
    """The arguments of these names, which `lc.SeedReplay` explains."""

    group: dist.ProcessGroup | None
    store: dist.Store | None
    machine_id: int | str | None
    exchange: Exchange | None

    @property
    def others(self) -> set[int]:
        """The global ranks of the group, without this one; empty where machines meet otherwise."""
        if self.group is None or self.group == dist.GroupMember.NON_GROUP_MEMBER:
            return set()
        return set(dist.get_process_group_ranks(self.group)) - {dist.get_rank()}

    def expect(self, ranks: Sequence[int]) -> str:
        """Returns the one way's name; ValueError for more, a part of one, or a group with another of the machine's `ranks`."""
        ways = {"group": self.group, "store": self.store, "exchange": self.exchange}
        given = [name for name, way in ways.items() if way is not None]
        if len(given) > 1:
            raise ValueError("SeedReplay: expected one of group, store and exchange, got more")
        if (self.store is None) != (self.machine_id is None):
            got = "machine_id alone" if self.store is None else "store alone"
            raise ValueError(f"SeedReplay: expected store and machine_id, got {got}")
        if others := sorted(self.others & set(ranks)):
            raise ValueError(
                f"SeedReplay: group: expected one rank of each machine, got ranks {others} of this one too, whose parameters "
                "are sharded together"
            )
        return f"{given[0]} {self.machine_id}" if given else "alone"

    def begin(self, *, samples: int | None) -> Exchange:
        """Returns the exchange. `samples`: this machine's in every iteration; None if their number changes."""
        if self.exchange is not None:
            return self.exchange
        if self.store is not None and self.machine_id is not None:
            return StoreExchange(self.store, self.machine_id)
        if self.group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("SeedReplay: group: expected one that this rank is in, got GroupMember.NON_GROUP_MEMBER")
        return Alone() if self.group is None else StaticExchange(self.group, samples=samples)


class SeveralRanks:
    """The parts of a machine of several ranks, whose weights this rank's `optimizer` moves. The first rank acts by `lead`; it
    gives `core` to an exchange and `optimizer` to a checkpoint.
    """

    def __init__(self, optimizer: Checkpointed, ranks: MachineRanks) -> None:
        core = optimizer.core
        of_core: Steps = {
            "checksum": lambda _, __: core.checksum(),
            "apply": lambda _, records: core.apply(records),
            "forget_log": lambda before, _: core.forget_log(before=before),
        }
        of_optimizer: Steps = {
            "snapshot": lambda _, __: optimizer.snapshot(),
            "load_snapshot": lambda _, __: optimizer.load_snapshot({}),
            "replay": lambda _, records: optimizer.replay(records),
        }
        self.lead = Lead(ranks, {**of_core, **of_optimizer})
        self.core: Any = Led(core, self.lead, [*of_core])
        self.optimizer: Any = Led(optimizer, self.lead, [*of_optimizer])
        self.optimizer.core = self.core


class MachineExchange(Exchange):
    """An exchange in which a machine's first rank speaks for all its ranks: one message a machine. join, exchange and check
    are collective of the machine; join and check also compare what its ranks have. `inner` is on the first rank only.
    """

    def __init__(self, inner: Exchange | None, several: SeveralRanks, machine: int) -> None:
        self._inner, self._lead, self.machine, self._there = inner, several.lead, machine, 0
        self._led, self._of_first = several.core, cast("Exchange", inner)  # used on the first rank only

    def join(self, core: _C.SeedReplay) -> None:
        """As Exchange.join."""
        self._lead(lambda: self._compared(self._of_first.join))

    def exchange(self, core: _C.SeedReplay, message: bytes, *, lr: float, weight_decay: float) -> bytes:
        """As Exchange.exchange."""
        step = {"lr": lr, "weight_decay": weight_decay}
        record: bytes = self._lead(lambda: self._of_first.exchange(self._led, message, **step))
        self._there = len(_C.read_replay_records(record)[0]["machines"])
        return record

    def check(self, core: _C.SeedReplay) -> bool:
        """As Exchange.check."""
        replaced: bool = self._lead(lambda: self._compared(self._of_first.check))
        return replaced

    def leave(self) -> None:
        """As Exchange.leave; the first rank's counts, and it waits for no other rank."""
        if self._inner is not None:
            self._inner.leave()

    def stats(self) -> dict[str, Any]:
        """As Exchange.stats. Ranks other than the first exchange nothing with other machines."""
        if self._inner is not None:
            return self._inner.stats()
        return {**super().stats(), "machines": self._there}

    def _compared(self, method: Callable[[Any], bool | None]) -> bool | None:
        self._led.checksum()
        return method(self._led)


class MachineCheckpoint:
    """The folder of a machine of several ranks, which the first of them reads and writes: `inner`, None on the others."""

    def __init__(self, inner: Checkpoint | None, several: SeveralRanks) -> None:
        self._inner, self._led, self._lead = inner, several.optimizer, several.lead

    def __getattr__(self, name: str) -> Callable[[Checkpointed], None]:
        """A method of `Checkpoint`, as a collective of the machine."""
        return lambda _: self._lead(lambda: getattr(self._inner, name)(self._led))


def connected(
    optimizer: Checkpointed,
    ranks: MachineRanks,
    inner: Exchange | None,
    machine: int,
    folder: Path | None,
    *,
    every: int,
) -> tuple[Exchange, Checkpoint | MachineCheckpoint | None]:
    """Returns how a rank's optimizer exchanges and keeps records; with a store it also gives and takes snapshots. `inner` is
    the exchange among machines, on the first rank; None as `folder` keeps no records.
    """
    kept = None if folder is None or inner is None else Checkpoint(folder, every)
    speaker, exchange = optimizer, inner
    checkpoint: Checkpoint | MachineCheckpoint | None = kept
    if ranks.several:
        several = SeveralRanks(optimizer, ranks)
        speaker, exchange = several.optimizer, MachineExchange(inner, several, machine)
        checkpoint = None if folder is None else MachineCheckpoint(kept, several)
    if isinstance(inner, StoreExchange):
        inner.attach(lambda: packed(speaker.snapshot()), lambda data: speaker.load_snapshot(unpacked(data)))
    assert exchange is not None  # which the first rank has made
    return exchange, checkpoint
