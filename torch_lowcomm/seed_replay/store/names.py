"""Numbers, names and places of machines."""

from torch_lowcomm.seed_replay.store.keys import RunStore


class Names:
    """The keys `name/<number>`: a machine's place and its name, set by the first machine with this number.

    A number that is made from a name has twenty digits, and would be most of the bytes that an iteration sends. A machine's
    mail is therefore under its place, which is counted from 1.
    """

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._known: dict[int, tuple[int, str]] = {}

    def claim(self, number: int, name: str) -> None:
        """Takes a number for a name.

        Raises:
            ValueError: Another name has it: both names have the same first eight bytes of their hash.
        """
        value = self._store.find(f"name/{number}")
        if value is None:
            value = self._store.set_first(f"name/{number}", f"{self._store.count('names')} {name}".encode())
        self._known[number] = _, first = _place_and_name(value)
        if first != name:
            raise ValueError(
                f"seed replay: machine_id: expected one whose number, {number}, no other machine has, got {name!r}: it is "
                f"{first!r}'s too"
            )

    def of(self, number: int) -> str:
        """Returns the name of a machine of this run."""
        return self._find(number)[1]

    def mail(self, number: int) -> str:
        """Returns the key of a machine's mail."""
        return f"m{self._find(number)[0]}"

    def _find(self, number: int) -> tuple[int, str]:
        if number not in self._known:
            found = self._store.find(f"name/{number}")
            if found is None:
                raise RuntimeError(f"seed replay: expected name/{number} at the store, got none: its run was deleted")
            self._known[number] = _place_and_name(found)
        return self._known[number]


def _place_and_name(value: bytes) -> tuple[int, str]:
    place, _, name = value.decode().partition(" ")
    return int(place), name
