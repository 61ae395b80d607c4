"""Where a cache keeps its slots: one memory for each tensor of each boundary, in RAM or in a file."""

from __future__ import annotations

import os
import re
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from torch_lowcomm import _C


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
