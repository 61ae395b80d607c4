"""A run's records at the store: the latest singly, earlier ones in chunks."""

from __future__ import annotations

import json

from torch_lowcomm import _C
from torch_lowcomm.replay.agreed import Agreed, Founded
from torch_lowcomm.replay.mismatch import ReplayMismatch
from torch_lowcomm.replay.run_store import RunStore


class LogGap(RuntimeError):
    """The log at the store does not reach back to a machine's weights."""

    def __init__(self, iteration: int, begin: int | None) -> None:
        reaches = "the last snapshot" if begin is None else f"iteration {begin}"
        super().__init__(
            f"seed replay: expected weights of {reaches} or later, as the log at this store begins there, got some of "
            f"iteration {iteration}: take a later checkpoint"
        )


class LogMoved(RuntimeError):
    """Records that a chunk is to be made of are no longer there singly: others have written it, where the run has gone on."""


class RunLog:
    """Keys `log/<iteration>`, `chunk/<n>` and `earlier/<machine>` (PROTOCOL.md, "Log").

    Args:
        store: The run's keys.
        chunk: Iterations of a chunk; chunk n begins with iteration n·chunk, or with the run's first.
    """

    def __init__(self, store: RunStore, chunk: int) -> None:
        self._store, self._chunk = store, chunk
        self._recent: dict[int, bytes] = {}  # records of up to two chunks
        self._packed: int | None = None  # the last chunk known to be at the store

    def keep(self, agreed: Agreed) -> None:
        """Remembers a record, for the chunk that it will be in."""
        self._recent[agreed.iteration] = agreed.record
        self._recent.pop(agreed.iteration - 2 * self._chunk, None)

    def replay(self, core: _C.SeedReplay, founded: Founded, head: Agreed, *, compare: bool = True) -> None:
        """Applies all records from the core's iteration to the head's.

        Args:
            core: Of the weights.
            founded: How the run began.
            head: Where it is.
            compare: Checksums at the chunks' ends too; not where the machine that wrote one may have been the wrong one.

        Raises:
            LogGap: The log does not reach back so far.
            ValueError: Weights that the run did not begin with.
            ReplayMismatch: Other weights than the others had at that place.
        """
        if core.iteration < founded.iteration:
            self._earlier(core, founded)
        if core.iteration == founded.iteration and (mine := core.checksum()) != founded.checksum:
            raise ValueError(
                f"seed replay: expected the weights that the run has at iteration {founded.iteration}, with checksum "
                f"{founded.checksum:#010x}, got {mine:#010x}: machines begin with the same weights"
            )
        while core.iteration <= head.iteration:
            self._some(core, head, compare)

    def _earlier(self, core: _C.SeedReplay, founded: Founded) -> None:
        found = self._store.find_large(f"earlier/{founded.source}") if founded.earlier else None
        if found is None or found[0]["first"] > core.iteration:
            raise LogGap(core.iteration, founded.iteration if found is None else found[0]["first"])
        _replay(core, found[1], found[0]["first"])

    def _some(self, core: _C.SeedReplay, head: Agreed, compare: bool) -> None:
        """A chunk, or what follows the last one."""
        number = core.iteration // self._chunk
        if (number + 1) * self._chunk <= head.iteration + 1 and self._apply_chunk(core, number, compare):
            return
        end = min((number + 1) * self._chunk, head.iteration)
        iterations = range(core.iteration, end)
        values = self._store.find_all([f"log/{t}" for t in iterations])
        if None in values:  # deleted meanwhile, which happens after the chunk was written
            if not self._apply_chunk(core, number, compare):
                raise LogGap(core.iteration, None)
            return
        agreed = [Agreed.decode(value) for value in values if value is not None]
        if end == head.iteration:
            agreed.append(head)
        core.apply(b"".join(one.record for one in agreed))
        for one in agreed:
            self.keep(one)

    def _apply_chunk(self, core: _C.SeedReplay, number: int, compare: bool) -> bool:
        found = self._store.find_large(f"chunk/{number}")
        if found is None:
            return False
        told, records = found
        _replay(core, records, told["first"])
        end = told["first"] + told["count"]
        if core.iteration != end:
            raise ValueError(f"seed replay: chunk {number}: expected to end with iteration {end}, got {core.iteration}")
        if compare and told["checksum"] is not None and (mine := core.checksum()) != told["checksum"]:
            raise ReplayMismatch(
                f"seed replay: expected the others' weights of iteration {end}, with checksum {told['checksum']:#010x}, got "
                f"{mine:#010x} after replaying the log: the weights it began with were others"
            )
        return True

    # ---- chunks: written by whoever closed the last iteration of one ----
    def due(self, iteration: int) -> bool:
        """Whether a chunk has just become whole."""
        return iteration % self._chunk == 0

    def pack(self, core: _C.SeedReplay, founded: Founded) -> None:
        """Writes the chunk that ends before the core's iteration, and any that a machine died over.

        Raises:
            LogMoved: Records of them are gone.
        """
        last = core.iteration // self._chunk - 1
        first = founded.iteration // self._chunk
        missing = []
        for number in range(last, first - 1, -1):
            if number < last and (number == self._packed or not self._unpacked(number)):
                break
            missing.append(number)
        for number in reversed(missing):
            self._write(number, founded, core.checksum() if number == last else None)
        self._packed = last
        self._forget(last - 1, founded)

    def _unpacked(self, number: int) -> bool:
        """Whether a chunk is missing whose iterations are there. Where they are not it was packed, and may be deleted since."""
        last = (number + 1) * self._chunk - 1
        return self._store.find(f"chunk/{number}") is None and self._store.find(f"log/{last}") is not None

    def _write(self, number: int, founded: Founded, checksum: int | None) -> None:
        begin = max(number * self._chunk, founded.iteration)
        iterations = range(begin, (number + 1) * self._chunk)
        absent = [t for t in iterations if t not in self._recent]
        values = dict(zip(absent, self._store.find_all([f"log/{t}" for t in absent]), strict=True))
        if None in values.values():  # they are deleted once they are in a chunk
            raise LogMoved(f"seed replay: chunk {number}: expected its iterations in the log at the store, got not all")
        records = [self._recent.get(t) or Agreed.decode(values[t] or b"").record for t in iterations]
        self._store.put_large(f"chunk/{number}", b"".join(records), first=begin, count=len(records), checksum=checksum)

    def _forget(self, number: int, founded: Founded) -> None:
        """Deletes the single keys of a chunk that is followed by another: a machine that waits for one is not that late.

        Its first key last: where it is gone all are, and no later machine has to look.
        """
        while (end := (number + 1) * self._chunk) > founded.iteration:
            begin = max(number * self._chunk, founded.iteration)
            if self._store.find(f"log/{begin}") is None:
                return
            self._store.delete_later([f"log/{t}" for t in reversed(range(begin, end))])
            number -= 1


def forget_chunks(store: RunStore, before: int, chunk: int) -> None:
    """Deletes the chunks that end before an iteration, the latest first: where one is gone all earlier ones are."""
    number = before // chunk - 1
    while number >= 0 and (head := store.find(f"chunk/{number}")) is not None:
        store.delete_large_later(f"chunk/{number}", json.loads(head)["bytes"])
        number -= 1


def forget_earlier(store: RunStore, founded: Founded) -> None:
    """Deletes the records of the time before the founding."""
    if founded.earlier and (head := store.find(f"earlier/{founded.source}")) is not None:
        store.delete_large_later(f"earlier/{founded.source}", json.loads(head)["bytes"])


def _replay(core: _C.SeedReplay, records: bytes, first: int) -> None:
    """Replays those from the core's iteration on, of records that begin with iteration `first`."""
    at = 0
    for _ in range(core.iteration - first):  # a record begins with its length
        at += int.from_bytes(records[at : at + 4], "little")
    core.apply(records[at:])
