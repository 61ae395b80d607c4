"""The key `head`, which says where a run is, and by which machines commit."""

from torch_lowcomm.seed_replay.store.commit import Commit
from torch_lowcomm.seed_replay.store.keys import RunStore
from torch_lowcomm.seed_replay.store.log import RunLog


class Head:
    """The last commit that this machine knows of; the run may have gone on since.

    A machine that reads a commit from `head` itself puts it into the log. So no machine moves `head` on from a commit that
    the log does not have.

    Args:
        store: The run's keys.
        log: The run's log.
        first: The commit with which the run was founded.

    Attributes:
        commit: The last known commit.
    """

    commit: Commit

    def __init__(self, store: RunStore, log: RunLog, first: Commit) -> None:
        self._store, self._log, self._first = store, log, first
        self._value = b""  # of the key, when it was last known; the log has its record
        self.look()

    def look(self) -> None:
        """Reads the key: another machine may have moved it and died before it told the log."""
        value = self._store.find("head")
        self._know(self._store.set_first("head", self._first.encode()) if value is None else value)

    def propose(self, proposal: Commit) -> bool:
        """Moves the key on from the last known commit to a proposal.

        Returns:
            Whether the proposal is the commit now. If not, another machine has moved the key, and `commit` is that one's.
        """
        value = proposal.encode()
        self._know(self._store.swap("head", self._value, value))
        return self._value == value

    def wait(self, iteration: int, seconds: float) -> bool:
        """Waits for the commit of an iteration in the log.

        Returns:
            Whether it came in time; `commit` is this one then.
        """
        value = self._store.wait_for(f"log/{iteration}", seconds)
        if value is not None:
            self._value, self.commit = value, Commit.decode(value)
            self._log.keep(self.commit)
        return value is not None

    def _know(self, value: bytes) -> None:
        if value == self._value:
            return
        self._value, self.commit = value, Commit.decode(value)
        if self.commit.record:
            self._store.put(f"log/{self.commit.iteration}", value)
            self._log.keep(self.commit)
