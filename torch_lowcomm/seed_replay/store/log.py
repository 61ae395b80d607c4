"""A run's records at the store: the latest under a key each, earlier ones in chunks (PROTOCOL.md, "Log")."""

import json

from torch_lowcomm import _C
from torch_lowcomm.seed_replay.exchange import ReplayMismatch
from torch_lowcomm.seed_replay.store.commit import Commit
from torch_lowcomm.seed_replay.store.founding import Founding
from torch_lowcomm.seed_replay.store.keys import RunStore


class LogGap(RuntimeError):
    """The log at the store does not reach back to a machine's weights."""

    def __init__(self, iteration: int, begin: int | None) -> None:
        reaches = "the last snapshot" if begin is None else f"iteration {begin}"
        super().__init__(
            f"seed replay: expected weights of {reaches} or later, as the log at this store begins there, got some of "
            f"iteration {iteration}: take a later checkpoint"
        )


class LogMoved(RuntimeError):
    """Records for a chunk no longer have keys of their own: the run has gone on, and another machine has packed them."""


class RunLog:
    """The keys `log/<iteration>`, `chunk/<n>` and `earlier/<machine>`.

    Args:
        store: The run's keys.
        chunk: Number of iterations in a chunk; chunk n begins with iteration n·chunk, or with the run's first.
    """

    def __init__(self, store: RunStore, chunk: int) -> None:
        self._store, self._chunk = store, chunk
        self._recent: dict[int, bytes] = {}  # records of up to two chunks
        self._packed: int | None = None  # number of the last chunk that this machine has packed

    def keep(self, commit: Commit) -> None:
        """Remembers a record for the chunk that it will be in."""
        self._recent[commit.iteration] = commit.record
        self._recent.pop(commit.iteration - 2 * self._chunk, None)

    def replay(self, core: _C.SeedReplay, founding: Founding, last: Commit, *, compare: bool = True) -> None:
        """Applies all records from the core's iteration to that of a commit.

        Args:
            core: The core that has the weights.
            founding: How the run began.
            last: The commit of the last record to apply.
            compare: Whether to compare checksums at the ends of chunks; False where the machine that wrote a chunk may have
                had the wrong weights.

        Raises:
            LogGap: The log does not reach back so far.
            ValueError: The run did not begin with these weights.
            ReplayMismatch: The other machines had other weights at the end of a chunk.
        """
        if core.iteration < founding.iteration:
            self._apply_earlier(core, founding)
        if core.iteration == founding.iteration and (mine := core.checksum()) != founding.checksum:
            raise ValueError(
                f"seed replay: expected the weights that the run has at iteration {founding.iteration}, with checksum "
                f"{founding.checksum:#010x}, got {mine:#010x}: machines begin with the same weights"
            )
        while core.iteration <= last.iteration:
            self._apply_some(core, last, compare)

    def _apply_earlier(self, core: _C.SeedReplay, founding: Founding) -> None:
        found = self._store.find_large(f"earlier/{founding.source}") if founding.earlier else None
        if found is None or found[0]["first"] > core.iteration:
            raise LogGap(core.iteration, founding.iteration if found is None else found[0]["first"])
        _replay(core, found[1], found[0]["first"])

    def _apply_some(self, core: _C.SeedReplay, last: Commit, compare: bool) -> None:
        """Applies the chunk that begins at the core's iteration; after the last chunk, the records that follow."""
        number = core.iteration // self._chunk
        if (number + 1) * self._chunk <= last.iteration + 1 and self._apply_chunk(core, number, compare):
            return
        end = min((number + 1) * self._chunk, last.iteration)
        iterations = range(core.iteration, end)
        values = self._store.find_all([f"log/{t}" for t in iterations])
        if None in values:  # deleted meanwhile, which happens after the chunk was written
            if not self._apply_chunk(core, number, compare):
                raise LogGap(core.iteration, None)
            return
        commits = [Commit.decode(value) for value in values if value is not None]
        if end == last.iteration:
            commits.append(last)
        core.apply(b"".join(commit.record for commit in commits))
        for commit in commits:
            self.keep(commit)

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

    # ---- chunks: the leader of a chunk's last iteration writes it ----
    def due(self, iteration: int) -> bool:
        """Whether the iteration before `iteration` is the last one of a chunk."""
        return iteration % self._chunk == 0

    def pack(self, core: _C.SeedReplay, founding: Founding) -> None:
        """Writes the chunk that ends before the core's iteration, and earlier ones whose writer died before it wrote them.

        Raises:
            LogMoved: A record of these chunks has no key any more.
        """
        last = core.iteration // self._chunk - 1
        first = founding.iteration // self._chunk
        missing = []
        for number in range(last, first - 1, -1):
            if number < last and (number == self._packed or not self._unpacked(number)):
                break
            missing.append(number)
        for number in reversed(missing):
            self._write(number, founding, core.checksum() if number == last else None)
        self._packed = last
        self._forget(last - 1, founding)

    def _unpacked(self, number: int) -> bool:
        """Whether a chunk is missing and its iterations are there. If they are not, it was packed and may have been deleted."""
        last = (number + 1) * self._chunk - 1
        return self._store.find(f"chunk/{number}") is None and self._store.find(f"log/{last}") is not None

    def _write(self, number: int, founding: Founding, checksum: int | None) -> None:
        begin = max(number * self._chunk, founding.iteration)
        iterations = range(begin, (number + 1) * self._chunk)
        absent = [t for t in iterations if t not in self._recent]
        values = dict(zip(absent, self._store.find_all([f"log/{t}" for t in absent]), strict=True))
        if None in values.values():  # they are deleted once they are in a chunk
            raise LogMoved(f"seed replay: chunk {number}: expected its iterations in the log at the store, got not all")
        records = [self._recent.get(t) or Commit.decode(values[t] or b"").record for t in iterations]
        self._store.put_large(f"chunk/{number}", b"".join(records), first=begin, count=len(records), checksum=checksum)

    def _forget(self, number: int, founding: Founding) -> None:
        """Deletes the iterations' keys of chunk `number` and of those before it: no machine that waits for one is so late.

        A chunk's first key is deleted last: if it is gone all are, and later machines need not look.
        """
        while (end := (number + 1) * self._chunk) > founding.iteration:
            begin = max(number * self._chunk, founding.iteration)
            if self._store.find(f"log/{begin}") is None:
                return
            self._store.delete_later([f"log/{t}" for t in reversed(range(begin, end))])
            number -= 1


def forget_chunks(store: RunStore, before: int, chunk: int) -> None:
    """Deletes the chunks that end before an iteration, the latest first: if one is gone, all earlier ones are."""
    number = before // chunk - 1
    while number >= 0 and (head := store.find(f"chunk/{number}")) is not None:
        store.delete_large_later(f"chunk/{number}", json.loads(head)["bytes"])
        number -= 1


def forget_earlier(store: RunStore, founding: Founding) -> None:
    """Deletes the records of the time before the founding."""
    if founding.earlier and (head := store.find(f"earlier/{founding.source}")) is not None:
        store.delete_large_later(f"earlier/{founding.source}", json.loads(head)["bytes"])


def _replay(core: _C.SeedReplay, records: bytes, first: int) -> None:
    """Applies records from the core's iteration on; the first of `records` is of iteration `first`."""
    core.apply(_C.ReplayRecords(records).skip(max(core.iteration - first, 0)))
