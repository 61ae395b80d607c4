"""How a machine gets from the weights that it has to the present ones."""

from __future__ import annotations

import logging

from torch_lowcomm import _C
from torch_lowcomm.replay.agreed import Agreed, Founded
from torch_lowcomm.replay.mismatch import ReplayMismatch
from torch_lowcomm.replay.run_log import LogGap, RunLog
from torch_lowcomm.replay.run_store import RunStore
from torch_lowcomm.replay.snapshots import Snapshots

logger = logging.getLogger("torch_lowcomm")


class CatchUp:
    """By the log where it reaches back to them; else by a snapshot and the log since.

    Args:
        store: The run's keys.
        log: Of the run.
        snapshots: Of the run.
        resync: Whether weights that are not the run's are set to a snapshot, and no error.
    """

    def __init__(self, store: RunStore, log: RunLog, snapshots: Snapshots, *, resync: bool) -> None:
        self._store, self._log, self._snapshots, self.resync = store, log, snapshots, resync

    def bring(self, core: _C.SeedReplay, founded: Founded, head: Agreed) -> None:
        """Applies all records from the core's iteration to the head's. By a snapshot it may come to be further than the head.

        Raises:
            ValueError: Weights that the run did not begin with, or of an iteration that it has not reached.
            RuntimeError: The log does not reach back so far, and there is no snapshot.
            ReplayMismatch: Other weights than the others had at that place.
        """
        if core.iteration > head.iteration + 1:
            raise ValueError(
                f"seed replay: expected weights of iteration {head.iteration + 1}, where the run at this store is, or of an "
                f"earlier one, got some of iteration {core.iteration}: another run needs a store, or a prefix, of its own"
            )
        while True:
            try:
                self._log.replay(core, founded, head)
                return
            except LogGap:  # again where the others were faster than this: what the snapshot needs is gone too
                before = core.iteration
                if not self._snapshots.take(self._store, core, after=before):
                    raise
                logger.info("seed replay: took the snapshot of iteration %d, from iteration %d", core.iteration, before)
            except (ReplayMismatch, ValueError) as error:
                if not (self.resync and self.again(core, founded, head)):
                    raise
                logger.warning("%s: took a snapshot", error)
                return

    def again(self, core: _C.SeedReplay, founded: Founded, head: Agreed) -> bool:
        """Sets the weights to a snapshot, and applies the records since; False where there is none."""
        if not self._snapshots.take(self._store, core, after=-1):
            return False
        self._log.replay(core, founded, head, compare=False)
        return True
