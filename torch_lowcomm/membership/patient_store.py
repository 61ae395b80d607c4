"""A store that answers in time or is lost: torch's clients wait for as long as the connection looks alive."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from torch.distributed import Store


class PatientStore:
    """A client whose every call has a deadline. Once one has passed it, the client is lost for good.

    Calls are made on a thread of its own, which a cut link may hold for many minutes (TCP's own patience); callers are
    not held.

    Args:
        store: A client that nobody else uses.
        patience_s: Of a call, in seconds.
    """

    def __init__(self, store: Store, patience_s: float) -> None:
        self._store, self._patience_s = store, patience_s
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        self._lost: str | None = None
        threading.Thread(target=self._serve, name="lowcomm-store", daemon=True).start()

    def add(self, key: str, amount: int) -> int:
        """As the store's; so are the others. ConnectionError where it is lost or does not answer in time."""
        return self._call(lambda: self._store.add(key, amount))

    def set(self, key: str, value: str) -> None:
        """Sets a key."""
        self._call(lambda: self._store.set(key, value))

    def find(self, key: str) -> str | None:
        """The value of a key; None where it is not set."""
        return self._call(lambda: self._store.get(key).decode() if self._store.check([key]) else None)

    def set_first(self, key: str, value: str) -> str:
        """Sets a key that is not set yet; returns what it has now."""
        return self._call(lambda: self._store.compare_set(key, "", value).decode())

    def _call(self, call: Callable[[], Any]) -> Any:
        if self._lost is None:
            answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
            self._calls.put((call, answer))
            try:
                value, error = answer.get(timeout=self._patience_s)
            except queue.Empty:
                self._lost = f"expected an answer within {self._patience_s} s, got none"
            else:
                if error is None:
                    return value
                self._lost = str(error)
        raise ConnectionError(f"membership: lost the store: {self._lost}")

    def _serve(self) -> None:
        while True:
            call, answer = self._calls.get()
            try:
                answer.put((call(), None))
            except Exception as error:  # every kind of network error that torch's stores know
                answer.put((None, error))
