"""Where a cache keeps its slots: one memory for each tensor of each boundary, in RAM or in a file; and how slots move."""

from __future__ import annotations

import itertools
import os
import re
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from torch_lowcomm import _C
from torch_lowcomm.groups import exact

_ROUND_BYTES = 16 << 20  # that a rank sends in a round


class Slot(NamedTuple):
    """One tensor of one boundary, on one side of it: `sends` where this rank has the stage before it."""

    boundary: int
    position: int
    sends: bool

    def __str__(self) -> str:
        return f"{self.boundary}.{self.position}.{'sent' if self.sends else 'received'}"

    @classmethod
    def parse(cls, text: str) -> Slot:
        """The slot that str() has named so."""
        match = re.fullmatch(r"(\d+)\.(\d+)\.(sent|received)", text)
        if match is None:
            raise ValueError(f"slot: expected 'boundary.position.sent' or 'boundary.position.received', got {text!r}")
        return cls(int(match[1]), int(match[2]), match[3] == "sent")


class Slots:
    """The memories of one rank, by tensor, boundary and side; arguments and errors are those of `lc.pipeline.Cache`."""

    def __init__(self, store: str, folder: Path | None, run: str, max_bytes: int | None) -> None:
        self._store, self.folder, self._run, self._max_bytes = store, folder, run, max_bytes
        self._memories: dict[Slot, _C.SampleMemory] = {}
        self._shapes: dict[Slot, tuple[int, int]] = {}  # last dimension and unit, for the store's codec
        self._told: dict[tuple[Slot, str], int] = {}  # by keep_equal()
        if folder is None:
            return
        # A process that ends writes what waits.
        self._at_end = weakref.finalize(self, _flush, self._memories, os.getpid())
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass  # a folder that cannot be written is found now, not in the first step
        # At once: the first step compares what both sides remember. Empty: killed making it.
        for path in sorted(path for path in folder.glob("*.slots") if path.stat().st_size):
            self.memory(Slot.parse(path.stem), *_C.slot_file_shape(str(path)))

    @property
    def codec(self) -> str:
        """The codec of slots; "" where they are of a float type."""
        return "" if self._store in ("fp32", "fp16", "bf16") else self._store

    def memory(self, slot: Slot, elements: int, channels: int, unit: int = 0) -> _C.SampleMemory:
        """The memory of one tensor of one boundary, made where there is none; one of another size or unit is refused.

        A sample has `elements`, `channels` of them in its last dimension; the store codes each `unit` elements without regard to
        the others; 0: all together.
        """
        memory, where = self._memories.get(slot), "" if self.folder is None else f" (in {self.folder})"
        if memory is None:
            file = "" if self.folder is None else str(self.folder / f"{slot}.slots")
            memory = self._memories[slot] = _C.SampleMemory(
                elements,
                channels,
                self._store,
                unit=unit,
                file=file,
                place=str(slot),
                run=self._run,
                max_bytes=self._max_bytes,
            )
            self._shapes[slot] = channels, unit
        elif memory.elements != elements:
            raise ValueError(
                f"cache: boundary {slot}: expected {memory.elements} elements a sample, as it has{where}, got {elements}"
            )
        elif self._shapes[slot] != (channels, unit):
            given = _C.slot_format(elements, channels, self._store, unit)
            if memory.format != given:
                raise ValueError(
                    f"cache: boundary {slot}: expected slots in {memory.format}, as it has{where}, got {given}: begin with an "
                    "empty cache"
                )
        return memory

    def all(self) -> list[tuple[Slot, _C.SampleMemory, tuple[int, int]]]:
        """Each tensor of each boundary, with its memory, and its last dimension and unit."""
        return [(slot, memory, self._shapes[slot]) for slot, memory in sorted(self._memories.items())]

    def each(self, call: Callable[[_C.SampleMemory], None]) -> list[OSError]:
        """Calls for each memory; returns the errors of those that could not be read or written."""
        failed: list[OSError] = []
        for memory in self._memories.values():
            try:
                call(memory)
            except OSError as error:
                failed.append(error)
        return failed

    def close(self) -> None:
        """Flushes and lets the files go, all of them also where one cannot be written. Idempotent."""
        if self.folder is not None:
            self._at_end.detach()
        for error in self.each(_C.SampleMemory.close):
            raise error

    def rows(self, boundary: int, sends: bool) -> torch.Tensor:
        """The slots of one side of a boundary, to compare: int64 [slots, 4] of (position, sample, version, digest)."""
        rows = [
            (slot.position, *row)
            for slot, memory, _ in self.all()
            if slot.boundary == boundary and slot.sends == sends
            for row in memory.table()
        ]
        return torch.tensor(rows, dtype=torch.int64).view(-1, 4)

    def keep_equal(self, boundary: int, sends: bool, theirs: torch.Tensor) -> dict[str, int]:
        """Forgets at a boundary each sample that the other side, whose rows are given, does not have with the same bits.
        Returns how many slots of the boundary were forgotten since the last call, by reason; `lc.stats()` has these
        figures.
        """
        equal = set(map(tuple, theirs.tolist()))
        for position, sample, *rest in self.rows(boundary, sends).tolist():
            if (position, sample, *rest) not in equal:
                self._memories[Slot(boundary, position, sends)].forget(sample, "differs")
        new: dict[str, int] = {}
        for slot, memory in self._memories.items():
            if slot.boundary != boundary or slot.sends != sends:
                continue
            for why, slots in memory.counts["forgotten"].items():
                if more := slots - self._told.get((slot, why), 0):
                    new[why] = new.get(why, 0) + more
                self._told[slot, why] = slots
        return new


def _flush(memories: dict[Slot, _C.SampleMemory], process: int) -> None:
    if os.getpid() != process:  # a fork
        return
    for memory in memories.values():
        memory.flush()


class _Row(NamedTuple):
    """What is told of a slot, as int64."""

    boundary: int
    position: int
    sends: int
    elements: int
    channels: int
    unit: int
    sample: int
    version: int


def move_slots(slots: Slots, owners: torch.Tensor, group: dist.ProcessGroup) -> tuple[int, int]:
    """Gives the slots of samples that another replica owns to this one, as `Cache.move` says; returns how many it gave and took.

    Slots go in rounds. A rank lets go of a round's slots once they have arrived, and takes those that it gets unless it has one
    of as many updates, or has no room.
    """
    ranks = dist.get_world_size(group)
    mine = list(_rounds(slots, owners, dist.get_rank(group), ranks))
    given = taken = 0
    with exact():
        rounds = torch.tensor([len(mine)])
        dist.all_reduce(rounds, dist.ReduceOp.MAX, group=group)
        for number in range(int(rounds)):
            rows = mine[number] if number < len(mine) else [[] for _ in range(ranks)]
            got, payloads = _exchange(slots, rows, group)
            for row in (row for to in rows for row in to):
                _memory(slots, row).forget(row.sample)
                given += 1
            for row, payload in zip(got, payloads, strict=True):
                taken += _take(_memory(slots, row), row, payload)
    return given, taken


def _rounds(slots: Slots, owners: torch.Tensor, me: int, ranks: int) -> Iterator[list[list[_Row]]]:
    """Rows of the slots to give, by round and rank."""
    rows: list[list[_Row]] = [[] for _ in range(ranks)]
    total = 0
    for slot, memory, shape in slots.all():
        for sample, version, _ in memory.table():
            owner = int(owners[sample]) if sample < len(owners) else -1
            if owner in (-1, me):
                continue
            rows[owner].append(_Row(*slot, memory.elements, *shape, sample, version))
            total += memory.slot_bytes
            if total >= _ROUND_BYTES:
                yield rows
                rows, total = [[] for _ in range(ranks)], 0
    if total:
        yield rows


def _exchange(slots: Slots, rows: list[list[_Row]], group: dist.ProcessGroup) -> tuple[list[_Row], list[torch.Tensor]]:
    """Gives each rank its rows and their slots; returns those for this one."""
    counts = torch.tensor([len(to) for to in rows])
    counts_of = torch.empty_like(counts)
    dist.all_to_all_single(counts_of, counts, group=group)
    ours = torch.tensor([row for to in rows for row in to], dtype=torch.int64).view(-1, len(_Row._fields))
    theirs = torch.empty(int(counts_of.sum()), ours.shape[1], dtype=torch.int64)
    dist.all_to_all_single(theirs, ours, counts_of.tolist(), counts.tolist(), group=group)
    got = [_Row(*row) for row in theirs.tolist()]

    sizes = [_memory(slots, row).slot_bytes for row in got]
    rest = iter(sizes)
    by_rank = [sum(itertools.islice(rest, count)) for count in counts_of.tolist()]
    mine = [_memory(slots, row).read(row.sample) for to in rows for row in to]
    given = [sum(_memory(slots, row).slot_bytes for row in to) for to in rows]
    payload = torch.empty(sum(sizes), dtype=torch.uint8)
    dist.all_to_all_single(payload, torch.cat([torch.empty(0, dtype=torch.uint8), *mine]), by_rank, given, group=group)
    return got, list(payload.split(sizes))


def _memory(slots: Slots, row: _Row) -> _C.SampleMemory:
    return slots.memory(Slot(row.boundary, row.position, bool(row.sends)), row.elements, row.channels, row.unit)


def _take(memory: _C.SampleMemory, row: _Row, slot: torch.Tensor) -> bool:
    """Whether the slot is kept."""
    if memory.version(row.sample) >= row.version:
        return False
    try:
        memory.restore(row.sample, row.version, slot)
    except ValueError:  # no room: max_bytes
        memory.forget(row.sample, "no_room")
        return False
    return True
