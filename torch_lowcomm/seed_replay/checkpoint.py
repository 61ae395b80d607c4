"""A folder with a snapshot of the weights and the log since, from which a machine that was killed goes on.

Of the log, what a crash cut off is dropped, and what was damaged is refused.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from torch_lowcomm import _C
from torch_lowcomm._checksum import bytes_checksum
from torch_lowcomm._log import logger

_ENTRY = struct.Struct("<QI")  # bytes of the log so far, and their CRC-32C


class Checkpointed(Protocol):
    """What a checkpoint writes and reads: `lc.SeedReplay`, or on a machine of several ranks what stands for all of them."""

    @property
    def core(self) -> _C.SeedReplay:
        """Has the log since the run began, or since what was dropped of it."""

    @property
    def iteration(self) -> int:
        """The iteration that comes next."""

    def snapshot(self) -> dict[str, Any]:
        """Everything that another process needs to go on."""

    def load_snapshot(self, saved: dict[str, Any]) -> None:
        """Sets weights and state to a snapshot's."""

    def replay(self, records: bytes) -> int:
        """Applies records of the present iteration and later ones; returns their number."""


class Checkpoint:
    """Snapshots `snapshot-<iteration>.pt`, one `every` so many iterations, and from each on a `LogFile` `log-<iteration>.bin`.

    A record is written before the next iteration starts, so that a process that is killed loses one record at most. A snapshot
    gets its name when it is whole. The last two stay, with their logs: `core.log` reaches back to the one before the last, for
    machines that are behind when a run goes on at another store.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self._folder, self._every = folder, every
        self._begin = self._next = 0  # the last snapshot's iteration, and that of the record to come
        self._current = self._log(0)
        self._restoring = False
        folder.mkdir(parents=True, exist_ok=True)

    def restore(self, optimizer: Checkpointed) -> None:
        """Brings model and optimizer to where the folder is; makes the first snapshot if it is empty. The last snapshot but
        one is for others: what is wrong with it, or its log, is warned of. It is a ValueError where the last one is of another
        model or options, or is damaged and the one before does not lead to it.
        """
        found = self._snapshots()
        if not found:
            self.restart(optimizer)
            return
        self._restoring = True
        *before, last = found[-2:]
        for begin in before:
            try:
                self._load(optimizer, begin)
                self._replay(optimizer, begin)
            except Exception as error:
                logger.warning("SeedReplay: iteration %d of %s: skipped: %s", begin, self._folder, error)
        if not before or optimizer.iteration != last:
            self._load(optimizer, last)
        self._replay(optimizer, last)
        self._restoring = False
        self._begin, self._next = last, optimizer.iteration

    def restart(self, optimizer: Checkpointed) -> None:
        """Begins again: no record led to the present weights, and so nothing in the folder does."""
        if self._restoring:
            return
        begin = self._snapshot(optimizer)
        for before in self._snapshots():
            if before != begin:
                self._remove(before)
        self._log(begin).remove()

    def applied(self, optimizer: Checkpointed) -> None:
        """Writes the records that the optimizer has applied since the last call."""
        self._current.append(optimizer.core.log_from(self._next))
        self._next = optimizer.iteration
        if optimizer.iteration - self._begin >= self._every:
            before = self._begin
            self._snapshot(optimizer)
            for old in self._snapshots():
                if old < before:
                    self._remove(old)
            optimizer.core.forget_log(before=before)

    def _snapshot(self, optimizer: Checkpointed) -> int:
        begin = optimizer.iteration
        write_whole(self._path(begin), lambda part: torch.save(optimizer.snapshot(), part))
        self._begin = self._next = begin
        self._current = self._log(begin)
        return begin

    def _load(self, optimizer: Checkpointed, begin: int) -> None:
        path = self._path(begin)
        try:
            saved = torch.load(path, weights_only=True)
        except Exception as error:
            raise ValueError(f"SeedReplay: {path}: expected a snapshot, got a damaged file: {error}") from error
        optimizer.load_snapshot(saved)

    def _replay(self, optimizer: Checkpointed, begin: int) -> None:
        self._current = self._log(begin)
        if records := self._current.read():
            optimizer.replay(records)

    def _remove(self, begin: int) -> None:
        self._path(begin).unlink()
        self._log(begin).remove()

    def _snapshots(self) -> list[int]:
        names = (re.fullmatch(r"snapshot-(\d+)\.pt", path.name) for path in self._folder.iterdir())
        return sorted(int(name.group(1)) for name in names if name)

    def _path(self, begin: int) -> Path:
        return self._folder / f"snapshot-{begin}.pt"

    def _log(self, begin: int) -> LogFile:
        return LogFile(self._folder / f"log-{begin}.bin")


class LogFile:
    """The file `<name>.bin` of records, one behind another, at `path`, and `<name>.crc`, an entry for each append. A process
    may be killed between two writes: records come before their entry, and need none.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._sums = path, path.with_suffix(".crc")
        self._bytes = self._crc = 0

    def read(self) -> bytes:
        """Returns the records that are whole; drops what follows, with a warning. Others in their place are a ValueError."""
        records = self._path.read_bytes() if self._path.exists() else b""
        sums = self._sums.read_bytes() if self._sums.exists() else b""
        whole_entries = _ENTRY.iter_unpack(sums[: len(sums) // _ENTRY.size * _ENTRY.size])
        entries = [entry for entry in whole_entries if entry[0] <= len(records)]
        if entries and (got := bytes_checksum(records[: entries[-1][0]])) != entries[-1][1]:
            raise ValueError(
                f"SeedReplay: {self._path}: expected {entries[-1][0]} bytes with CRC-32C {entries[-1][1]:08x}, as they were "
                f"written, got {got:08x}: the file is damaged"
            )
        whole = _C.ReplayRecords(records).whole_prefix
        if len(whole) < len(records):
            logger.warning("%s: dropped %d bytes of a record that was not whole", self._path, len(records) - len(whole))
            write_whole(self._path, lambda part: part.write_bytes(whole))
        self._bytes, self._crc = len(whole), bytes_checksum(whole)
        entry = _ENTRY.pack(self._bytes, self._crc)
        write_whole(self._sums, lambda part: part.write_bytes(entry))
        return whole

    def append(self, records: bytes) -> None:
        """Writes records, then their entry."""
        self._bytes, self._crc = self._bytes + len(records), bytes_checksum(records, self._crc)
        for path, data in ((self._path, records), (self._sums, _ENTRY.pack(self._bytes, self._crc))):
            with path.open("ab") as file:
                file.write(data)

    def remove(self) -> None:
        """Deletes both files where they exist."""
        for path in (self._path, self._sums):
            path.unlink(missing_ok=True)


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Makes or replaces a file, which has its name once `write` has written all of it to another."""
    part = path.with_suffix(".part")
    write(part)
    part.rename(path)
