"""A folder with a snapshot of the weights and the log since, from which a machine that was killed goes on."""

import re
from pathlib import Path
from typing import Any, Protocol

import torch

from torch_lowcomm._log import logger
from torch_lowcomm.seed_replay.log_file import LogFile


class KeptLog(Protocol):
    """The log of what an optimizer has applied."""

    def log_from(self, begin: int, /) -> bytes:
        """The records of the iterations from `begin` on."""

    def forget_log(self, *, before: int) -> None:
        """Drops the records of the iterations before `before`."""


class Checkpointed(Protocol):
    """What a checkpoint writes and reads: `lc.SeedReplay`, or on a machine of several ranks what stands for all of them."""

    @property
    def core(self) -> KeptLog:
        """The log since the run began, or since what was dropped of it."""

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
    """Snapshots `snapshot-<iteration>.pt` and, from each on, `log-<iteration>.bin` and its checksums (`LogFile`).

    A record is written before the next iteration starts, so that a process that is killed loses one record at most. A
    snapshot gets its name when it is whole. The last two snapshots stay, with their logs: `core.log` reaches back to the one
    before the last, for machines that are behind when a run goes on at another store.

    Args:
        folder: The folder of one machine; it is made if it does not exist.
        every: Iterations from one snapshot to the next.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self._folder, self._every = folder, every
        self._begin = self._next = 0  # the last snapshot's iteration, and that of the record to come
        self._current = self._log(0)
        self._restoring = False
        folder.mkdir(parents=True, exist_ok=True)

    def restore(self, optimizer: Checkpointed) -> None:
        """Brings model and optimizer to where the folder is; makes the first snapshot if it is empty.

        The last snapshot but one is needed for others only: what is wrong with it, or its log, is warned of.

        Raises:
            ValueError: The last snapshot is of another model or other options, or is damaged and the one before does not lead
                to it.
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
        path = self._folder / f"snapshot-{optimizer.iteration}.pt"
        part = path.with_suffix(".part")
        torch.save(optimizer.snapshot(), part)
        part.rename(path)
        self._begin = self._next = optimizer.iteration
        self._current = self._log(self._begin)
        return self._begin

    def _load(self, optimizer: Checkpointed, begin: int) -> None:
        path = self._folder / f"snapshot-{begin}.pt"
        try:
            saved = torch.load(path, weights_only=True)
        except Exception as error:
            raise ValueError(f"SeedReplay: {path}: expected a snapshot, got a damaged file: {error}") from error
        optimizer.load_snapshot(saved)

    def _replay(self, optimizer: Checkpointed, begin: int) -> None:
        self._current = self._log(begin)
        records = self._current.read()
        if records:
            optimizer.replay(records)

    def _remove(self, begin: int) -> None:
        (self._folder / f"snapshot-{begin}.pt").unlink()
        self._log(begin).remove()

    def _snapshots(self) -> list[int]:
        names = (re.fullmatch(r"snapshot-(\d+)\.pt", path.name) for path in self._folder.iterdir())
        return sorted(int(name.group(1)) for name in names if name)

    def _log(self, begin: int) -> LogFile:
        return LogFile(self._folder / f"log-{begin}.bin")
