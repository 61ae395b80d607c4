"""What a machine does with a run's past: it brings its weights to the present, packs the log, and writes snapshots."""

import random
import time

from torch_lowcomm import _C
from torch_lowcomm._log import logger
from torch_lowcomm.seed_replay.exchange import ReplayMismatch
from torch_lowcomm.seed_replay.store.head import Head
from torch_lowcomm.seed_replay.store.log import LogGap, LogMoved, RunLog
from torch_lowcomm.seed_replay.store.options import StoreExchangeOptions
from torch_lowcomm.seed_replay.store.run import Run
from torch_lowcomm.seed_replay.store.snapshots import Snapshots

_POLL_S = 0.01  # for another machine's checksum


class History:
    """Replays the log where it reaches back to a machine's weights, else takes a snapshot and the log since; keeps both."""

    def __init__(self, run: Run, head: Head, log: RunLog, snapshots: Snapshots, options: StoreExchangeOptions) -> None:
        self._run, self._store, self._machine = run, run.store, run.machine
        self._head, self._log, self._snapshots = head, log, snapshots
        self._every, self._resync = options.snapshot_every, options.resync

    def bring(self, core: _C.SeedReplay) -> None:
        """Applies all records to the head's iteration, or raises as `StoreExchange.join` says; a snapshot may lead further."""
        commit = self._head.commit
        if core.iteration > commit.iteration + 1:
            raise ValueError(
                f"SeedReplay: expected weights of iteration {commit.iteration + 1}, where the run at this store is, or of an "
                f"earlier one, got some of iteration {core.iteration}: another run needs a store, or a prefix, of its own"
            )
        while True:
            try:
                self._log.replay(core, commit)
                return
            except LogGap:  # again where the others were faster: the records after the snapshot are gone too
                before = core.iteration
                if not self._snapshots.take(self._store, core, after=before):
                    raise
                logger.info("SeedReplay: took the snapshot of iteration %d, from iteration %d", core.iteration, before)
            except (ReplayMismatch, ValueError) as error:
                if not self.resynced(core, error):
                    raise
                return

    def resynced(self, core: _C.SeedReplay, why: Exception) -> bool:
        """With `resync`, sets weights that are not the run's to a snapshot, and applies the records since. Returns whether it
        did.
        """
        if not (self._resync and self._snapshots.take(self._store, core, after=-1)):
            return False
        self._log.replay(core, self._head.commit, compare=False)
        logger.warning("%s: took a snapshot", why)
        return True

    def differs(self, core: _C.SeedReplay, machines: list[int], *, wait_s: float) -> ReplayMismatch | None:
        """Returns the error where the weights differ from those of one of `machines`, the last record's, as
        `StoreExchange.check` says; None if they do not, or the other's checksum has not come in `wait_s`.
        """
        store, mine, iteration = self._store, core.checksum(), core.iteration
        store.set(f"sum/{self._machine}", f"{iteration} {mine}")
        others = [other for other in machines if other != self._machine]
        if not others:
            return None
        peer = random.choice(others)
        name = self._run.name_of(peer)
        deadline = time.monotonic() + wait_s
        while True:
            at, theirs = map(int, (store.find(f"sum/{peer}") or b"-1 0").split())
            if at == iteration and mine != theirs:
                return ReplayMismatch(
                    f"SeedReplay: expected the same weights as machine {name!r} at iteration {iteration}, with checksum "
                    f"{theirs:#010x}, got {mine:#010x}"
                )
            if at >= iteration or name in self._run.beat.gone() or time.monotonic() > deadline:
                return None
            time.sleep(_POLL_S)

    def shorten(self, core: _C.SeedReplay, *, returned: int) -> None:
        """Cuts the core's log off where the store's begins, and before `returned`, the last iteration that the caller has got."""
        if self._every:
            snapshot = core.iteration // self._every * self._every
            core.forget_log(before=max(min(snapshot - self._every, returned), 0))

    def keep(self, core: _C.SeedReplay) -> None:
        """Packs the log and takes a snapshot if this machine led the last iteration of a chunk, and the run has not gone on
        since: then others have packed it, and may have deleted it.
        """
        if not (self._log.due(core.iteration) and self._led_last(core)):
            return
        self._head.look()
        if not self._led_last(core):
            return
        try:
            self._log.pack(core)
        except LogMoved:
            self._head.look()
            if self._led_last(core):
                raise
            return
        if self._snapshots.due(core.iteration):
            self._snapshots.write(core, self._log.founding.iteration, self._log.forget)

    def _led_last(self, core: _C.SeedReplay) -> bool:
        last = self._head.commit
        return last.leader == self._machine and bool(last.record) and last.iteration == core.iteration - 1
