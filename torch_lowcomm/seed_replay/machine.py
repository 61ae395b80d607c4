"""How a machine exchanges and keeps its records; one of several ranks has one voice among the machines, and one folder."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from torch_lowcomm import _C
from torch_lowcomm._saved import packed, unpacked
from torch_lowcomm.seed_replay.checkpoint import Checkpoint, Checkpointed
from torch_lowcomm.seed_replay.exchange import Exchange
from torch_lowcomm.seed_replay.lead import Lead, Steps
from torch_lowcomm.seed_replay.machine_ranks import MachineRanks, OneRank
from torch_lowcomm.seed_replay.store import StoreExchange


class Led:
    """What the machine's first rank gives to an exchange or a checkpoint in an object's place: all ranks do its steps.

    Args:
        target: The first rank's object. What is no step is its own.
        lead: Tells the other ranks a step, with the bytes and the number that it is called with.
        steps: Names of the methods that are steps.
    """

    def __init__(self, target: Any, lead: Lead, steps: Sequence[str]) -> None:
        self._target, self._lead, self._steps = target, lead, steps

    def __getattr__(self, name: str) -> Any:
        """The object's attribute; a step of the machine where it is one."""
        found = getattr(self._target, name)
        return functools.partial(self._step, name, found) if name in self._steps else found

    def _step(self, name: str, call: Callable[..., Any], *args: Any, **numbers: int) -> Any:
        data = b"".join(part for part in args if isinstance(part, bytes))
        return self._lead.tell(name, number=sum(numbers.values()), data=data, act=lambda: call(*args, **numbers))


class SeveralRanks:
    """The parts of a machine of several ranks.

    Args:
        optimizer: This rank's optimizer, whose core is that of the machine's weights.
        ranks: The machine's ranks.

    Attributes:
        lead: Lets the first rank act, and the others follow it.
        core: What the first rank gives to an exchange.
        optimizer: What the first rank gives to a checkpoint.
    """

    def __init__(self, optimizer: Checkpointed, ranks: MachineRanks) -> None:
        core = cast("_C.SeedReplay", optimizer.core)
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
    """An exchange in which a machine's first rank speaks for all its ranks: one message a machine.

    Args:
        inner: The exchange among machines; None on ranks other than the first.
        several: The machine's parts.
        machine: Number of this machine.
    """

    def __init__(self, inner: Exchange | None, several: SeveralRanks, machine: int) -> None:
        self._inner, self._lead, self.machine, self._there = inner, several.lead, machine, 0
        self._led, self._of_first = several.core, cast("Exchange", inner)  # used on the first rank only

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
        return {**super().stats(), "machines": self._there}


class MachineCheckpoint:
    """The folder of a machine of several ranks. The first rank reads and writes it.

    Args:
        inner: The folder; None on ranks other than the first.
        several: The machine's parts.
    """

    def __init__(self, inner: Checkpoint | None, several: SeveralRanks) -> None:
        self._of_first = cast("Checkpoint", inner)  # used on the first rank only
        self._led, self._lead = several.optimizer, several.lead

    def restore(self, optimizer: Checkpointed) -> None:
        """As Checkpoint.restore. Collective of the machine."""
        self._lead(lambda: self._of_first.restore(self._led))

    def applied(self, optimizer: Checkpointed) -> None:
        """As Checkpoint.applied. Collective of the machine."""
        self._lead(lambda: self._of_first.applied(self._led))

    def restart(self, optimizer: Checkpointed) -> None:
        """As Checkpoint.restart. Collective of the machine."""
        self._lead(lambda: self._of_first.restart(self._led))


def connected(
    optimizer: Checkpointed,
    ranks: OneRank | MachineRanks,
    inner: Exchange | None,
    machine: int,
    folder: Path | None,
    *,
    every: int,
) -> tuple[Exchange, Checkpoint | MachineCheckpoint | None]:
    """Returns how a rank's optimizer exchanges and keeps records; with a store it also gives and takes snapshots.

    Args:
        optimizer: The rank's.
        ranks: The machine's ranks.
        inner: The exchange among machines, on the first rank.
        machine: The machine's number.
        folder: Where the machine's records are kept, or None.
        every: Iterations from one snapshot in the folder to the next.
    """
    kept = None if folder is None or inner is None else Checkpoint(folder, every)
    speaker, exchange = optimizer, inner
    checkpoint: Checkpoint | MachineCheckpoint | None = kept
    if isinstance(ranks, MachineRanks):
        several = SeveralRanks(optimizer, ranks)
        speaker, exchange = several.optimizer, MachineExchange(inner, several, machine)
        checkpoint = None if folder is None else MachineCheckpoint(kept, several)
    if isinstance(inner, StoreExchange):
        inner.attach(lambda: packed(speaker.snapshot()), lambda data: speaker.load_snapshot(unpacked(data)))
    assert exchange is not None  # which the first rank has made
    return exchange, checkpoint
