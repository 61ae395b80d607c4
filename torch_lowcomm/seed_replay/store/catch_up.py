"""How a machine gets from the weights that it has to the present ones."""

from torch_lowcomm import _C
from torch_lowcomm._log import logger
from torch_lowcomm.seed_replay.exchange import ReplayMismatch
from torch_lowcomm.seed_replay.store.commit import Commit
from torch_lowcomm.seed_replay.store.founding import Founding
from torch_lowcomm.seed_replay.store.keys import RunStore
from torch_lowcomm.seed_replay.store.log import LogGap, RunLog
from torch_lowcomm.seed_replay.store.snapshots import Snapshots


class CatchUp:
    """Replays the log where it reaches back to a machine's weights; else takes a snapshot and the log since.

    Args:
        store: The run's keys.
        log: The run's log.
        snapshots: The run's snapshots.
        resync: Whether weights that are not the run's are replaced by a snapshot, in place of an error.
    """

    def __init__(self, store: RunStore, log: RunLog, snapshots: Snapshots, *, resync: bool) -> None:
        self._store, self._log, self._snapshots, self.resync = store, log, snapshots, resync

    def bring(self, core: _C.SeedReplay, founding: Founding, commit: Commit) -> None:
        """Applies all records from the core's iteration to that of a commit. A snapshot may take the core further.

        Raises:
            ValueError: The run did not begin with these weights, or has not reached their iteration.
            RuntimeError: The log does not reach back so far, and there is no snapshot.
            ReplayMismatch: The other machines had other weights at that iteration.
        """
        if core.iteration > commit.iteration + 1:
            raise ValueError(
                f"seed replay: expected weights of iteration {commit.iteration + 1}, where the run at this store is, or of an "
                f"earlier one, got some of iteration {core.iteration}: another run needs a store, or a prefix, of its own"
            )
        while True:
            try:
                self._log.replay(core, founding, commit)
                return
            except LogGap:  # again where the others were faster: the records after the snapshot are gone too
                before = core.iteration
                if not self._snapshots.take(self._store, core, after=before):
                    raise
                logger.info("seed replay: took the snapshot of iteration %d, from iteration %d", core.iteration, before)
            except (ReplayMismatch, ValueError) as error:
                if not (self.resync and self.again(core, founding, commit)):
                    raise
                logger.warning("%s: took a snapshot", error)
                return

    def again(self, core: _C.SeedReplay, founding: Founding, commit: Commit) -> bool:
        """Sets the weights to a snapshot and applies the records since; returns False if there is no snapshot."""
        if not self._snapshots.take(self._store, core, after=-1):
            return False
        self._log.replay(core, founding, commit, compare=False)
        return True
