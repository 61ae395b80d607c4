"""A folder with a snapshot of the weights and the log since: what a machine goes on from after it was killed."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torch_lowcomm import _C

if TYPE_CHECKING:
    from torch_lowcomm.replay.optimizer import SeedReplay

logger = logging.getLogger("torch_lowcomm")


class Checkpoint:
    """Snapshots `snapshot-<iteration>.pt` and, from each on, `log-<iteration>.bin`: records one behind another.

    A record is written before the next iteration starts, so that a process that is killed loses at most the record it was
    at; a snapshot takes its name when it is whole, and what came before it is removed then.

    Args:
        folder: Of one machine; made where there is none.
        every: Iterations from a snapshot to the next.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self._folder, self._every = folder, every
        self._begin = self._next = 0  # the snapshot's iteration, and that of the record to come
        folder.mkdir(parents=True, exist_ok=True)

    def restore(self, optimizer: SeedReplay) -> None:
        """Brings model and optimizer to where the folder is; makes the first snapshot where it is empty.

        Raises:
            ValueError: The snapshot is of another model or other options.
        """
        found = self._snapshots()
        if not found:
            self._snapshot(optimizer)
            return
        saved = torch.load(self._folder / f"snapshot-{found[-1]}.pt", weights_only=True)
        optimizer.load_snapshot(saved)
        log = self._log(found[-1])
        records = log.read_bytes() if log.exists() else b""
        whole = _whole(records)
        if len(whole) < len(records):
            logger.warning("%s: dropped %d bytes of a record that was not whole", log, len(records) - len(whole))
            _write(log, whole)
        if whole:
            optimizer.replay(whole)
        self._begin, self._next = found[-1], optimizer.iteration  # the log stays, for machines that are behind

    def applied(self, optimizer: SeedReplay) -> None:
        """The optimizer has moved on, by records in its log or, where others sent their weights, by a leap."""
        said = [one for one in _C.read_replay_records(optimizer.core.log) if one["iteration"] >= self._next]
        if not said or said[0]["iteration"] != self._next or optimizer.iteration - self._begin >= self._every:
            self._snapshot(optimizer)
            return
        with self._log(self._begin).open("ab") as file:
            file.write(b"".join(one["bytes"] for one in said))
        optimizer.core.forget_log()
        self._next = optimizer.iteration

    def _snapshot(self, optimizer: SeedReplay) -> None:
        path = self._folder / f"snapshot-{optimizer.iteration}.pt"
        part = path.with_suffix(".part")
        torch.save(optimizer.snapshot(), part)
        part.rename(path)
        for before in self._snapshots()[:-1]:
            (self._folder / f"snapshot-{before}.pt").unlink()
            self._log(before).unlink(missing_ok=True)
        optimizer.core.forget_log()
        self._begin = self._next = optimizer.iteration

    def _snapshots(self) -> list[int]:
        names = (re.fullmatch(r"snapshot-(\d+)\.pt", path.name) for path in self._folder.iterdir())
        return sorted(int(name.group(1)) for name in names if name)

    def _log(self, begin: int) -> Path:
        return self._folder / f"log-{begin}.bin"


def _whole(log: bytes) -> bytes:
    """The records at the start of a log that are whole."""
    at = 0
    while at < len(log):
        length = int.from_bytes(log[at : at + 4], "little")
        try:
            _C.read_replay_records(log[at : at + length])
        except ValueError:
            break
        if length == 0:
            break
        at += length
    return log[:at]


def _write(path: Path, data: bytes) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.rename(path)
