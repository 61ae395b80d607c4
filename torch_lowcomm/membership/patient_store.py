"""A store client with a deadline for every call; torch's clients wait for as long as the connection looks alive."""

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

from torch.distributed import Store

_SLICES = 10  # of a deadline


class PatientStore:
    """A client whose every call has a deadline. Once a call has passed its deadline, the client is lost for good.

    Calls run on a separate thread. A cut link may hold this thread for many minutes (TCP's time-out); it does not hold the
    callers.

    Args:
        store: A client that nobody else uses.
        patience_s: Deadline of a call, in seconds.

    Attributes:
        sent_bytes: Bytes of keys and values, without the store's own framing, except those of ask() and later().
    """

    def __init__(self, store: Store, patience_s: float) -> None:
        self._store, self._patience_s = store, patience_s
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any] | None]] = queue.SimpleQueue()
        self._lost: str | None = None
        self.sent_bytes = 0
        threading.Thread(target=self._serve, name="lowcomm-store", daemon=True).start()

    def add(self, key: str, amount: int) -> int:
        """Adds to a number and returns the sum.

        Raises:
            ConnectionError: The store is lost or does not answer in time; so in the other methods.
        """
        self.sent_bytes += len(key)
        return self.ask(lambda: self._store.add(key, amount))

    def set(self, key: str, value: str) -> None:
        """Sets a key."""
        self.sent_bytes += len(key) + len(value)
        self.ask(lambda: self._store.set(key, value))

    def set_later(self, key: str, value: str) -> None:
        """Sets a key after the calls before it, and does not wait for it."""
        self.sent_bytes += len(key) + len(value)
        self.later(lambda: self._store.set(key, value))

    def find(self, key: str) -> str | None:
        """Returns the value of a key, or None if it is not set."""
        self.sent_bytes += 2 * len(key)
        return self.ask(lambda: self._store.get(key).decode() if self._store.check([key]) else None)

    def has_all(self, keys: list[str]) -> bool:
        """Whether all of these keys are set, in one call."""
        self.sent_bytes += sum(map(len, keys))
        return self.ask(lambda: self._store.check(keys))

    def get_all(self, keys: list[str]) -> list[str]:
        """Returns the values of keys, all of them set, in one call."""
        self.sent_bytes += sum(map(len, keys))
        return self.ask(lambda: [value.decode() for value in self._store.multi_get(keys)])

    def set_first(self, key: str, value: str) -> str:
        """Sets a key unless it is set already; returns its value now."""
        self.sent_bytes += len(key) + len(value)
        return self.ask(lambda: self._store.compare_set(key, "", value).decode())

    def ask(self, call: Callable[[], Any], *, wait_s: float = 0.0) -> Any:
        """Makes the caller's own call at the store and returns its result.

        Args:
            call: Runs on this client's thread.
            wait_s: Seconds that the call itself may wait for something, in addition to the client's patience.

        Raises:
            ConnectionError: The store is lost or does not answer in time.
        """
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        if self._lost is None:
            self._calls.put((call, answer))
            try:
                value, error = self._answered(answer, self._patience_s + wait_s)
            except queue.Empty:
                self._lost = f"expected an answer within {self._patience_s + wait_s:g} s, got none"
            else:
                if error is None:
                    return value
                self._lost = str(error)
        raise ConnectionError(f"membership: lost the store: {self._lost}")

    def later(self, call: Callable[[], Any]) -> None:
        """Makes a call after those before it and does not wait for it. If it fails, the next call raises."""
        if self._lost is None:
            self._calls.put((call, None))

    @staticmethod
    def _answered(answer: queue.SimpleQueue[Any], deadline_s: float) -> Any:
        """Waits in slices: a process that was stopped and wakes up has lost one slice and not the whole deadline."""
        for _ in range(_SLICES - 1):
            with contextlib.suppress(queue.Empty):
                return answer.get(timeout=deadline_s / _SLICES)
        return answer.get(timeout=deadline_s / _SLICES)

    def _serve(self) -> None:
        while True:
            call, answer = self._calls.get()
            try:
                value, error = call(), None
            except Exception as raised:  # every kind of network error that torch's stores know
                value, error = None, raised
            if answer is not None:
                answer.put((value, error))
            elif error is not None:
                self._lost = str(error)
