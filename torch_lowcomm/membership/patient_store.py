"""A store client with a deadline for every call; torch's clients wait for as long as the connection looks alive."""

import contextlib
import json
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, Store

_SLICES = 10  # of a deadline
_PIECE = 1 << 20  # bytes of a long value
_LIMIT = 8 << 20  # of a value: TCPStore closes the connection there
_VANISHED_S = 60.0  # for a key that was there, and was deleted before it was read


class PatientStore:
    """A client whose every call has a deadline of `patience_s`. Once a call has passed it, the client is lost for good.

    Calls run on a separate thread, which a cut link may hold for many minutes (TCP's time-out); it does not hold the callers.
    Every method that asks the store raises ConnectionError if it is lost or does not answer in time. No key that may be
    deleted is ever empty: TCPStore returns an empty value for a key that is deleted while it is read. `sent_bytes` and
    `received_bytes` count keys and values, without the store's own framing. Errors begin with `user`.
    """

    def __init__(self, store: Store, patience_s: float, user: str = "membership") -> None:
        self._store, self._patience_s, self._user = store, patience_s, user
        self._vanished_s = min(_VANISHED_S, patience_s / 2)
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any] | None]] = queue.SimpleQueue()
        self._lost: str | None = None
        self.sent_bytes = self.received_bytes = 0
        threading.Thread(target=self._serve, name="lowcomm-store", daemon=True).start()

    def add(self, key: str, amount: int) -> int:
        """Adds to a number and returns the sum."""
        self.sent_bytes += len(key)
        return self._ask(lambda: self._store.add(key, amount))

    def set(self, key: str, value: str | bytes) -> None:
        """Sets a key; a value that is too long for TCPStore is a ValueError."""
        self._expect_fits(key, value)
        self.sent_bytes += len(key) + len(value)
        self._ask(lambda: self._store.set(key, value))

    def set_later(self, key: str, value: str) -> None:
        """Sets a key after the calls before it, and does not wait for it. If it fails, the next call raises."""
        self.sent_bytes += len(key) + len(value)
        self._later(lambda: self._store.set(key, value))

    def find(self, key: str) -> bytes | None:
        """Returns the value of a key, or None if it is not set."""
        self.sent_bytes += len(key)
        if not self._ask(lambda: self._store.check([key])):
            return None
        return self._received(key, lambda: self._get(key, self._vanished_s))

    def find_all(self, keys: list[str]) -> list[bytes | None]:
        """Returns the values of keys, None for those that are not set: in one call if all are set."""
        if keys and self.has_all(keys):
            with contextlib.suppress(TimeoutError):
                return [value or None for value in self.get_all(keys)]
        return [self.find(key) for key in keys]

    def has_all(self, keys: list[str]) -> bool:
        """Whether all of these keys are set, in one call."""
        self.sent_bytes += sum(map(len, keys))
        return self._ask(lambda: self._store.check(keys))

    def get_all(self, keys: list[str]) -> list[bytes]:
        """Returns the values of keys in one call; one that is not set is a TimeoutError."""

        def call() -> list[bytes] | None:
            self._store.set_timeout(timedelta(seconds=self._vanished_s))
            try:
                return self._store.multi_get(keys)
            except DistStoreError:  # a time-out; a lost connection is another error
                return None

        self.sent_bytes += sum(map(len, keys))
        values = self._ask(call)
        if values is None:
            raise TimeoutError(f"{self._user}: expected {keys} at the store, got not all of them")
        self.received_bytes += sum(map(len, values))
        return values

    def wait_for(self, key: str, seconds: float) -> bytes | None:
        """Returns the value of a key as soon as it has one, or None if it has none in time. The store tells, without polls."""
        return self._received(key, lambda: self._get(key, seconds), wait_s=seconds)

    def swap(self, key: str, expected: bytes, desired: str | bytes) -> bytes:
        """Sets a key if its value is `expected` (b"": not set); returns its value now. ValueError as in `set`."""
        self._expect_fits(key, desired)
        self.sent_bytes += len(expected) + len(desired)
        return self._received(key, lambda: self._store.compare_set(key, expected, desired))

    def set_first(self, key: str, value: str | bytes) -> bytes:
        """Sets a key unless it is set already; returns its value now."""
        return self.swap(key, b"", value)

    def delete_later(self, keys: list[str]) -> None:
        """Deletes keys, in this order, while the caller does other things."""
        for key in keys:
            self.sent_bytes += len(key)
            self._later(lambda key=key: self._store.delete_key(key))

    # ---- values of any size, in pieces, with a head that is written last ----
    def put_large(self, key: str, value: bytes, **head: Any) -> None:
        """Sets `key/0`, `key/1`, … to pieces of a value, then `key` to {"bytes": its length, **head} in JSON."""
        for i, begin in enumerate(range(0, len(value), _PIECE)):
            self.set(f"{key}/{i}", value[begin : begin + _PIECE])
        self.set(key, json.dumps({"bytes": len(value), **head}))

    def find_large(self, key: str) -> tuple[dict[str, Any], bytes] | None:
        """Returns the head and the value that `put_large` set, or None if they are not set or are being deleted; pieces
        without the length that the head says are a ValueError.
        """
        head = self.find(key)
        if head is None:
            return None
        told = json.loads(head)
        value = b"".join(self.find(piece) or b"" for piece in _pieces(key, told["bytes"]))
        if len(value) != told["bytes"]:
            if self.find(key) is None:
                return None
            raise ValueError(f"{self._user}: {key} at the store: expected {told['bytes']} bytes, got {len(value)}")
        return told, value

    def delete_large_later(self, key: str, size: int | None = None) -> bool:
        """Deletes what `put_large` set, of `size` or as long as its head says, head first; returns whether it is there."""
        if size is None:
            head = self.find(key)
            if head is None:
                return False
            size = json.loads(head)["bytes"]
        self.delete_later([key, *_pieces(key, size)])
        return True

    # ---- calls on the client's thread ----
    def _expect_fits(self, key: str, value: str | bytes) -> None:
        if len(value) >= _LIMIT:
            raise ValueError(
                f"{self._user}: {key}: expected less than {_LIMIT} bytes, got {len(value)}, which a TCPStore cannot hold"
            )

    def _get(self, key: str, seconds: float) -> bytes | None:
        self._store.set_timeout(timedelta(seconds=max(seconds, 0.001)))
        try:
            return self._store.get(key) or None  # b"": it was deleted after the wait
        except DistStoreError:
            return None

    def _received(self, key: str, call: Callable[[], Any], *, wait_s: float = 0.0) -> Any:
        self.sent_bytes += len(key)
        value = self._ask(call, wait_s=wait_s)
        self.received_bytes += len(value or b"")
        return value

    def _ask(self, call: Callable[[], Any], *, wait_s: float = 0.0) -> Any:
        """Returns the result of a call, which itself may wait for `wait_s` seconds in addition to the client's patience."""
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
        raise ConnectionError(f"{self._user}: lost the store: {self._lost}")

    def _later(self, call: Callable[[], Any]) -> None:
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


def _pieces(key: str, size: int) -> list[str]:
    return [f"{key}/{i}" for i in range(-(-size // _PIECE))]
