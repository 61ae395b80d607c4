"""What a machine does for the log between two iterations: it packs chunks, writes snapshots, and shortens its own log."""

from torch_lowcomm import _C
from torch_lowcomm.seed_replay.store.founding import Founding
from torch_lowcomm.seed_replay.store.head import Head
from torch_lowcomm.seed_replay.store.keys import RunStore
from torch_lowcomm.seed_replay.store.log import LogMoved, RunLog, forget_chunks, forget_earlier
from torch_lowcomm.seed_replay.store.options import StoreExchangeOptions
from torch_lowcomm.seed_replay.store.snapshots import Snapshots


class Keeper:
    """Keeps a run's log, where this machine led the last iteration of a chunk.

    Args:
        options: Chunk and snapshots.
        head: The last known commit.
        log: The run's log.
        snapshots: The run's snapshots.
        founding: How the run began.
        machine: This machine's number.
    """

    def __init__(
        self,
        options: StoreExchangeOptions,
        head: Head,
        log: RunLog,
        snapshots: Snapshots,
        founding: Founding,
        machine: int,
    ) -> None:
        self._chunk, self._every = options.chunk, options.snapshot_every
        self._head, self._log, self._snapshots = head, log, snapshots
        self._founding, self._machine = founding, machine

    def shorten(self, core: _C.SeedReplay, *, returned: int) -> None:
        """Cuts the core's log off where the store's begins.

        Args:
            core: The core.
            returned: The iteration of the last record that the caller has got; later ones stay.
        """
        if self._every:
            snapshot = core.iteration // self._every * self._every
            core.forget_log(before=max(min(snapshot - self._every, returned), 0))

    def keep(self, core: _C.SeedReplay) -> None:
        """Packs the log and takes a snapshot if this machine led the last iteration of a chunk.

        If the run has gone on since, because the caller was away for long, it does nothing: others have packed this chunk, and
        may have deleted it.
        """
        if not (self._log.due(core.iteration) and self._led_last(core)):
            return
        self._head.look()
        if not self._led_last(core):
            return
        try:
            self._log.pack(core, self._founding)
        except LogMoved:
            self._head.look()
            if self._led_last(core):
                raise
            return
        if self._snapshots.due(core.iteration):
            self._snapshots.write(core, self._founding.iteration, self._forget)

    def _forget(self, store: RunStore, before: int) -> None:
        """Deletes the log at the store before an iteration."""
        forget_earlier(store, self._founding)
        forget_chunks(store, before, self._chunk)

    def _led_last(self, core: _C.SeedReplay) -> bool:
        """Whether the last known commit is of the iteration before the core's, and this machine led it."""
        last = self._head.commit
        return last.leader == self._machine and bool(last.record) and last.iteration == core.iteration - 1
