"""Numbers, names and places of machines."""

from __future__ import annotations

from torch_lowcomm.replay.run_store import RunStore


class Names:
    """The names at a store: `name/<number>` has a machine's place and its name, the first to come has it.

    A number made of a name has twenty digits, and keys with it are most of what an iteration sends: a machine's mail is
    at its place, which is counted from 1.
    """

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._known: dict[int, tuple[int, str]] = {}

    def claim(self, number: int, name: str) -> None:
        """Takes a number for a name.

        Raises:
            ValueError: Another name has it, of which the same eight bytes are a hash.
        """
        value = self._store.find(f"name/{number}")
        if value is None:
            value = self._store.set_first(f"name/{number}", f"{self._store.count('names')} {name}".encode())
        self._known[number] = _, first = _parted(value)
        if first != name:
            raise ValueError(
                f"seed replay: machine_id: expected one whose number, {number}, no other machine has, got {name!r}: it is "
                f"{first!r}'s too"
            )

    def of(self, number: int) -> str:
        """The name of a machine of this run."""
        return self._find(number)[1]

    def mail(self, number: int) -> str:
        """The key of a machine's mail."""
        return f"m{self._find(number)[0]}"

    def _find(self, number: int) -> tuple[int, str]:
        if number not in self._known:
            found = self._store.find(f"name/{number}")
            if found is None:
                raise RuntimeError(f"seed replay: expected name/{number} at the store, got none: its run was deleted")
            self._known[number] = _parted(found)
        return self._known[number]


def _parted(value: bytes) -> tuple[int, str]:
    place, _, name = value.decode().partition(" ")
    return int(place), name
