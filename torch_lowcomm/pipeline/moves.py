"""Slots that go with their samples to another replica of a pipeline."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from torch_lowcomm import _C
from torch_lowcomm.groups import exact
from torch_lowcomm.pipeline.slots import Slot, Slots

_ROUND_BYTES = 16 << 20  # that a rank sends in a round


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
