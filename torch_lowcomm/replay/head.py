"""The one key that says where a run is."""

from __future__ import annotations

from torch_lowcomm.replay.agreed import Agreed, Founded
from torch_lowcomm.replay.run_log import RunLog
from torch_lowcomm.replay.run_store import RunStore


class Head:
    """What this machine knows `head` to be; it may have moved on since.

    Whatever it learns from the key itself it puts to the log, so that nobody moves the head on from what the log has not.

    Args:
        store: The run's keys.
        log: Of the run.
        founded: What the head is before the first record.
    """

    def __init__(self, store: RunStore, log: RunLog, founded: Founded) -> None:
        self._store, self._log, self._founded = store, log, founded
        self._value = b""  # of the key, when it was last known; of this the log has the record
        self.look()

    agreed: Agreed

    def look(self) -> None:
        """Reads it: somebody may have moved it and died before telling."""
        value = self._store.find("head")
        self._know(self._store.set_first("head", self._founded.head().encode()) if value is None else value)

    def swap(self, desired: Agreed) -> bool:
        """Moves it on from what it was known as; whether it is so now. If not, somebody else has moved it."""
        value = desired.encode()
        self._know(self._store.swap("head", self._value, value))
        return self._value == value

    def wait(self, iteration: int, seconds: float) -> bool:
        """Waits until something is agreed on an iteration, and knows it then; whether it was in time."""
        value = self._store.wait_for(f"log/{iteration}", seconds)
        if value is not None:
            self._value, self.agreed = value, Agreed.decode(value)
            self._log.keep(self.agreed)
        return value is not None

    def _know(self, value: bytes) -> None:
        if value == self._value:
            return
        self._value, self.agreed = value, Agreed.decode(value)
        if self.agreed.record:
            self._store.put(f"log/{self.agreed.iteration}", value)
            self._log.keep(self.agreed)
