"""The key `head`, which says where a run is, and by which machines commit."""

from torch_lowcomm.membership.patient_store import PatientStore
from torch_lowcomm.seed_replay.store.commit import Commit
from torch_lowcomm.seed_replay.store.log import RunLog


class Head:
    """The last commit that this machine knows of; the run may have gone on since. A machine that reads a commit from `head`
    itself puts it into the log, so that none moves `head` on from a commit that the log does not have.
    """

    commit: Commit  # the last known one

    def __init__(self, store: PatientStore, log: RunLog) -> None:
        self._store, self._log = store, log
        self._value = b""  # of the key, when it was last known; the log has its record
        self.look()

    def look(self) -> None:
        """Reads the key: another machine may have moved it and died before it told the log."""
        value = self._store.find("head")
        if value is None:
            value = self._store.set_first("head", self._log.founding.commit().encode())
        self._know(value)

    def propose(self, proposal: Commit) -> bool:
        """Moves the key on from the last known commit to a proposal; returns False where another machine's is `commit` now."""
        value = proposal.encode()
        self._know(self._store.swap("head", self._value, value))
        return self._value == value

    def wait(self, iteration: int, seconds: float) -> bool:
        """Waits for the commit of an iteration in the log; returns whether it came in time and is `commit` now."""
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
            self._store.set(f"log/{self.commit.iteration}", value)
            self._log.keep(self.commit)
