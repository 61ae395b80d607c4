"""A folder with a snapshot of the weights and the log since, from which a machine that was killed goes on."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torch_lowcomm import _C

if TYPE_CHECKING:
    from torch_lowcomm.seed_replay.optimizer import SeedReplay

logger = logging.getLogger("torch_lowcomm")


class Checkpoint:
    """Snapshots `snapshot-<iteration>.pt` and, from each on, `log-<iteration>.bin`: records one behind another.

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
        self._restoring = False
        folder.mkdir(parents=True, exist_ok=True)

    def restore(self, optimizer: SeedReplay) -> None:
        """Brings model and optimizer to where the folder is; makes the first snapshot if it is empty.

        Raises:
            ValueError: The snapshot is of another model or other options.
        """
        found = self._snapshots()
        if not found:
            self.restart(optimizer)
            return
        self._restoring = True
        for begin in found[-2:]:
            if optimizer.iteration != begin or begin == found[-2:][0]:
                optimizer.load_snapshot(torch.load(self._folder / f"snapshot-{begin}.pt", weights_only=True))
            records = self._records(begin)
            if records:
                optimizer.replay(records)
        self._restoring = False
        self._begin, self._next = found[-1], optimizer.iteration

    def restart(self, optimizer: SeedReplay) -> None:
        """Begins again: no record led to the present weights, and so nothing in the folder does."""
        if self._restoring:
            return
        begin = self._snapshot(optimizer)
        for before in self._snapshots():
            if before != begin:
                self._remove(before)
        self._log(begin).unlink(missing_ok=True)

    def applied(self, optimizer: SeedReplay) -> None:
        """Writes the records that the optimizer has applied since the last call."""
        with self._log(self._begin).open("ab") as file:
            file.write(optimizer.core.log_from(self._next))
        self._next = optimizer.iteration
        if optimizer.iteration - self._begin >= self._every:
            before = self._begin
            self._snapshot(optimizer)
            for old in self._snapshots():
                if old < before:
                    self._remove(old)
            optimizer.core.forget_log(before=before)

    def _snapshot(self, optimizer: SeedReplay) -> int:
        path = self._folder / f"snapshot-{optimizer.iteration}.pt"
        part = path.with_suffix(".part")
        torch.save(optimizer.snapshot(), part)
        part.rename(path)
        self._begin = self._next = optimizer.iteration
        return self._begin

    def _remove(self, begin: int) -> None:
        (self._folder / f"snapshot-{begin}.pt").unlink()
        self._log(begin).unlink(missing_ok=True)

    def _records(self, begin: int) -> bytes:
        """Reads a snapshot's log, without the last record if a process was killed while it wrote it."""
        log = self._log(begin)
        records = log.read_bytes() if log.exists() else b""
        whole = _C.ReplayRecords(records).whole_prefix
        if len(whole) < len(records):
            logger.warning("%s: dropped %d bytes of a record that was not whole", log, len(records) - len(whole))
            part = log.with_suffix(".part")
            part.write_bytes(whole)
            part.rename(log)
        return whole

    def _snapshots(self) -> list[int]:
        names = (re.fullmatch(r"snapshot-(\d+)\.pt", path.name) for path in self._folder.iterdir())
        return sorted(int(name.group(1)) for name in names if name)

    def _log(self, begin: int) -> Path:
        return self._folder / f"log-{begin}.bin"
