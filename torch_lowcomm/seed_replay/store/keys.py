"""The keys of a run at a store: values are bytes, every call has a deadline, and the bytes that travel are counted."""

import contextlib
import json
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, Store

from torch_lowcomm.membership.patient_store import PatientStore

_PIECE = 1 << 20  # bytes of a long value
_LIMIT = 8 << 20  # of a value: TCPStore closes the connection there
_VANISHED_S = 60.0  # for a key that was there, and was deleted before it was read


class RunStore:
    """A client of the run's keys, for one thread. Every method raises ConnectionError if the store is lost.

    No key that may be deleted is ever empty: TCPStore returns an empty value for a key that is deleted while it is read.

    Args:
        store: A client that nobody else uses.
        patience_s: Seconds that an answer may take.

    Attributes:
        sent_bytes: Bytes of keys and values, without the store's own framing.
        received_bytes: Bytes of values.
    """

    def __init__(self, store: Store, patience_s: float) -> None:
        self._store, self._patient = store, PatientStore(store, patience_s)
        self._vanished_s = min(_VANISHED_S, patience_s / 2)
        self.sent_bytes = self.received_bytes = 0

    def put(self, key: str, value: bytes) -> None:
        """Sets a key. ValueError: TCPStore does not take such a long value."""
        self._expect_fits(key, value)
        self.sent_bytes += len(key) + len(value)
        self._patient.ask(lambda: self._store.set(key, value))

    def find(self, key: str) -> bytes | None:
        """Returns the value of a key, or None if it is not set."""
        self.sent_bytes += len(key)
        if not self._patient.ask(lambda: self._store.check([key])):
            return None
        return self._received(key, lambda: self._get(key, self._vanished_s))

    def find_all(self, keys: list[str]) -> list[bytes | None]:
        """Returns the values of keys, None for those that are not set: in one call if all are set."""
        self.sent_bytes += sum(map(len, keys))
        if keys and self._patient.ask(lambda: self._store.check(keys)):
            with contextlib.suppress(TimeoutError):
                return [value or None for value in self.get_all(keys)]
        return [self.find(key) for key in keys]

    def get_all(self, keys: list[str]) -> list[bytes]:
        """Returns the values of keys that are all set.

        Raises:
            TimeoutError: One of them is not set.
        """

        def call() -> list[bytes] | None:
            self._store.set_timeout(timedelta(seconds=self._vanished_s))
            try:
                return self._store.multi_get(keys)
            except DistStoreError:  # a time-out; a lost connection is another error
                return None

        self.sent_bytes += sum(map(len, keys))
        values = self._patient.ask(call, wait_s=self._vanished_s)
        if values is None:
            raise TimeoutError(f"seed replay: expected {keys} at the store, got not all of them")
        self.received_bytes += sum(map(len, values))
        return values

    def wait_for(self, key: str, seconds: float) -> bytes | None:
        """Returns the value of a key as soon as it has one, or None if it has none in time. The store tells; nobody polls."""
        return self._received(key, lambda: self._get(key, seconds), wait_s=seconds)

    def swap(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Sets a key if its value is `expected` (b"": not set); returns its value now. ValueError as in `put`."""
        self._expect_fits(key, desired)
        self.sent_bytes += len(expected) + len(desired)
        return self._received(key, lambda: self._store.compare_set(key, expected, desired))

    def set_first(self, key: str, value: bytes) -> bytes:
        """Sets a key unless it is set already; returns its value now."""
        return self.swap(key, b"", value)

    def count(self, key: str) -> int:
        """Adds 1 to a number and returns the sum."""
        self.sent_bytes += len(key)
        return self._patient.ask(lambda: self._store.add(key, 1))

    def delete_later(self, keys: list[str]) -> None:
        """Deletes keys, in this order, while the caller does other things."""
        for key in keys:
            self.sent_bytes += len(key)
            self._patient.later(lambda key=key: self._store.delete_key(key))

    # ---- values of any size, in pieces, with a head that is written last ----
    def put_large(self, key: str, value: bytes, **head: Any) -> None:
        """Sets `key/0`, `key/1`, … to pieces of a value, then `key` to {"bytes": its length, **head} in JSON."""
        for i, begin in enumerate(range(0, len(value), _PIECE)):
            self.put(f"{key}/{i}", value[begin : begin + _PIECE])
        self.put(key, json.dumps({"bytes": len(value), **head}).encode())

    def find_large(self, key: str) -> tuple[dict[str, Any], bytes] | None:
        """Returns the head and the value that `put_large` set, or None if they are not set or are being deleted.

        Raises:
            ValueError: The pieces do not have the length that the head says.
        """
        head = self.find(key)
        if head is None:
            return None
        told = json.loads(head)
        pieces = [self.find(f"{key}/{i}") or b"" for i in range(-(-told["bytes"] // _PIECE))]
        value = b"".join(pieces)
        if len(value) != told["bytes"]:
            if self.find(key) is None:
                return None
            raise ValueError(f"seed replay: {key} at the store: expected {told['bytes']} bytes, got {len(value)}")
        return told, value

    def delete_large_later(self, key: str, size: int) -> None:
        """Deletes a value that `put_large` set, its head first."""
        self.delete_later([key, *(f"{key}/{i}" for i in range(-(-size // _PIECE)))])

    @staticmethod
    def _expect_fits(key: str, value: bytes) -> None:
        if len(value) >= _LIMIT:
            raise ValueError(
                f"seed replay: {key}: expected less than {_LIMIT} bytes, got {len(value)}: too many estimates"
            )

    def _get(self, key: str, seconds: float) -> bytes | None:
        self._store.set_timeout(timedelta(seconds=max(seconds, 0.001)))
        try:
            return self._store.get(key) or None  # b"": it was deleted after the wait
        except DistStoreError:
            return None

    def _received(self, key: str, call: Any, *, wait_s: float = 0.0) -> bytes | None:
        self.sent_bytes += len(key)
        value = self._patient.ask(call, wait_s=wait_s)
        self.received_bytes += len(value or b"")
        return value
