"""Numbers and names of machines."""

from __future__ import annotations

from torch_lowcomm.replay.run_store import RunStore


class Names:
    """The names at a store: `name/<number>`, the first to come has it."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._known: dict[int, str] = {}

    def claim(self, number: int, name: str) -> None:
        """Takes a number for a name.

        Raises:
            ValueError: Another name has it, of which the same eight bytes are a hash.
        """
        first = self._store.set_first(f"name/{number}", name.encode()).decode()
        if first != name:
            raise ValueError(
                f"seed replay: machine_id: expected one whose number, {number}, no other machine has, got {name!r}: it is "
                f"{first!r}'s too"
            )

    def of(self, number: int) -> str:
        """The name of a machine of this run."""
        if number not in self._known:
            found = self._store.find(f"name/{number}")
            self._known[number] = str(number) if found is None else found.decode()
        return self._known[number]
