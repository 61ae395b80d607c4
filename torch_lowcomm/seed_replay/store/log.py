"""A run's records at the store: the latest under a key each, earlier ones in chunks (PROTOCOL.md, "Log")."""

from torch_lowcomm import _C
from torch_lowcomm.membership.patient_store import PatientStore
from torch_lowcomm.seed_replay.exchange import ReplayMismatch
from torch_lowcomm.seed_replay.store.commit import Commit
from torch_lowcomm.seed_replay.store.founding import Founding


class LogGap(RuntimeError):
    """The log at the store does not reach back to a machine's weights."""

    def __init__(self, iteration: int, begin: int | None) -> None:
        reaches = "the last snapshot" if begin is None else f"iteration {begin}"
        super().__init__(
            f"SeedReplay: expected weights of {reaches} or later, as the log at this store begins there, got some of "
            f"iteration {iteration}: take a later checkpoint"
        )


class LogMoved(RuntimeError):
    """Records for a chunk no longer have keys of their own: the run has gone on, and another machine has packed them."""


class RunLog:
    """The keys `log/<iteration>`, `chunk/<n>` and `earlier/<machine>`. Chunk n has `chunk` iterations, and begins with
    iteration n·chunk or the run's first.
    """

    def __init__(self, store: PatientStore, chunk: int, founding: Founding) -> None:
        self._store, self._chunk, self.founding = store, chunk, founding
        self._recent: dict[int, bytes] = {}  # records of up to two chunks
        self._packed: int | None = None  # number of the last chunk that this machine has packed

    def keep(self, commit: Commit) -> None:
        """Remembers a record for the chunk that it will be in."""
        self._recent[commit.iteration] = commit.record
        self._recent.pop(commit.iteration - 2 * self._chunk, None)

    def replay(self, core: _C.SeedReplay, last: Commit, *, compare: bool = True) -> None:
        """Applies all records from the core's iteration to that of the commit `last`. Where the log does not reach back so far
        it is a LogGap. At the ends of chunks other weights are a ReplayMismatch, but where the writer may have had wrong ones
        (`compare` False).
        """
        founding = self.founding
        if core.iteration < founding.iteration:
            found = self._store.find_large(f"earlier/{founding.source}") if founding.earlier else None
            if found is None or found[0]["first"] > core.iteration:
                raise LogGap(core.iteration, founding.iteration if found is None else found[0]["first"])
            _replay(core, found[1], found[0]["first"])
        if core.iteration == founding.iteration and (mine := core.checksum()) != founding.checksum:
            raise ValueError(
                f"SeedReplay: expected the weights that the run has at iteration {founding.iteration}, with checksum "
                f"{founding.checksum:#010x}, got {mine:#010x}: machines begin with the same weights"
            )
        while core.iteration <= last.iteration:
            self._apply_some(core, last, compare)

    def _apply_some(self, core: _C.SeedReplay, last: Commit, compare: bool) -> None:
        """Applies the chunk that begins at the core's iteration; after the last chunk, the records that follow."""
        number = core.iteration // self._chunk
        if (number + 1) * self._chunk <= last.iteration + 1 and self._apply_chunk(core, number, compare):
            return
        end = min((number + 1) * self._chunk, last.iteration)
        values = self._store.find_all([f"log/{t}" for t in range(core.iteration, end)])
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
            raise ValueError(f"SeedReplay: chunk {number}: expected to end with iteration {end}, got {core.iteration}")
        if compare and told["checksum"] is not None and (mine := core.checksum()) != told["checksum"]:
            raise ReplayMismatch(
                f"SeedReplay: expected the others' weights of iteration {end}, with checksum {told['checksum']:#010x}, got "
                f"{mine:#010x} after replaying the log: the weights it began with were others"
            )
        return True

    # ---- chunks: the leader of a chunk's last iteration writes it ----
    def due(self, iteration: int) -> bool:
        """Whether the iteration before `iteration` is the last one of a chunk."""
        return iteration % self._chunk == 0

    def pack(self, core: _C.SeedReplay) -> None:
        """Writes the chunk that ends before the core's iteration, and earlier ones whose writer died before it wrote them. A
        record of them that has no key any more is a LogMoved.
        """
        last = core.iteration // self._chunk - 1
        missing = []
        for number in range(last, self.founding.iteration // self._chunk - 1, -1):
            if number < last and (number == self._packed or not self._unpacked(number)):
                break
            missing.append(number)
        for number in reversed(missing):
            self._write(number, core.checksum() if number == last else None)
        self._packed = last
        self._forget_records(last - 1)

    def _unpacked(self, number: int) -> bool:
        """Whether a chunk is missing and its iterations are there. If they are not, it was packed and may have been deleted."""
        last = (number + 1) * self._chunk - 1
        return self._store.find(f"chunk/{number}") is None and self._store.find(f"log/{last}") is not None

    def _iterations(self, number: int) -> range:
        return range(max(number * self._chunk, self.founding.iteration), (number + 1) * self._chunk)

    def _write(self, number: int, checksum: int | None) -> None:
        iterations = self._iterations(number)
        absent = [t for t in iterations if t not in self._recent]
        values = dict(zip(absent, self._store.find_all([f"log/{t}" for t in absent]), strict=True))
        if None in values.values():  # they are deleted once they are in a chunk
            raise LogMoved(f"SeedReplay: chunk {number}: expected its iterations in the log at the store, got not all")
        records = [self._recent.get(t) or Commit.decode(values[t] or b"").record for t in iterations]
        told = {"first": iterations.start, "count": len(records), "checksum": checksum}
        self._store.put_large(f"chunk/{number}", b"".join(records), **told)

    def _forget_records(self, number: int) -> None:
        """Deletes the iterations' keys of chunk `number` and of those before it: no machine that waits for one is so late. A
        chunk's first key is deleted last: if it is gone all are, and later machines need not look.
        """
        while iterations := self._iterations(number):
            if self._store.find(f"log/{iterations.start}") is None:
                return
            self._store.delete_later([f"log/{t}" for t in reversed(iterations)])
            number -= 1

    def forget(self, store: PatientStore, before: int) -> None:
        """Deletes chunks that end before an iteration, the latest first: if one is gone, all earlier ones are."""
        if self.founding.earlier:
            store.delete_large_later(f"earlier/{self.founding.source}")
        number = before // self._chunk - 1
        while number >= 0 and store.delete_large_later(f"chunk/{number}"):
            number -= 1


def _replay(core: _C.SeedReplay, records: bytes, first: int) -> None:
    """Applies records from the core's iteration on; the first of `records` is of iteration `first`."""
    core.apply(_C.ReplayRecords(records).skip(max(core.iteration - first, 0)))
