"""A run at a store as one of its machines sees it."""

import dataclasses
import json

from torch_lowcomm.membership.heartbeat import Heartbeat
from torch_lowcomm.membership.patient_store import PatientStore

_CLOSE = 16  # iterations that a machine may be behind when it is let in: it replays them faster than they are made


@dataclasses.dataclass(frozen=True)
class JoinRequest:
    """A machine that wants to take part, and the weights that it has: `ask/<i>` in PROTOCOL.md, which explains the fields."""

    machine: int
    name: str
    iteration: int
    checksum: int = 0
    earlier: int = 0


class Run:
    """The machines of a run, by number: their names and places, and their join requests.

    The key `name/<number>` has a machine's place and its name, set by the first machine with this number. A number that is made
    from a name has twenty digits, and would be most of the bytes that an iteration sends. A machine's mail is therefore under
    its place, which is counted from 1.

    The keys `asks`, a number, and `ask/<1 … asks>` have the requests. A machine that died between the two left a number without
    a request.
    """

    beat: Heartbeat  # which machines are alive, by name, and which were and are so no longer; set before this one joins

    def __init__(self, store: PatientStore, machine: int) -> None:
        self.store, self.machine = store, machine
        self._known: dict[int, tuple[int, str]] = {}

    def claim(self, name: str) -> None:
        """Takes this machine's number for its name, unless another name has the same first eight bytes of its hash."""
        number = self.machine
        value = self.store.find(f"name/{number}")
        if value is None:
            value = self.store.set_first(f"name/{number}", f"{self.store.add('names', 1)} {name}")
        self._known[number] = _, first = _place_and_name(value)
        if first != name:
            raise ValueError(
                f"SeedReplay: machine_id: expected one whose number, {number}, no other machine has, got {name!r}: it is "
                f"{first!r}'s too"
            )

    def name_of(self, number: int) -> str:
        """Returns the name of a machine of this run."""
        return self._find(number)[1]

    def mail_of(self, number: int) -> str:
        """Returns the key of a machine's mail."""
        return f"m{self._find(number)[0]}"

    def _find(self, number: int) -> tuple[int, str]:
        if number not in self._known:
            found = self.store.find(f"name/{number}")
            if found is None:
                raise RuntimeError(f"SeedReplay: expected name/{number} at the store, got none: its run was deleted")
            self._known[number] = _place_and_name(found)
        return self._known[number]

    def ask(self, iteration: int, **founding: int) -> int:
        """Empties this machine's mail and puts a join request to the store, before the founding with `checksum` and `earlier`.
        Returns the request's number.
        """
        self.store.set(self.mail_of(self.machine), b"")
        request = JoinRequest(self.machine, self.name_of(self.machine), iteration, **founding)
        number = self.store.add("asks", 1)
        self.store.set(f"ask/{number}", json.dumps(dataclasses.asdict(request)))
        return number

    def requests(self, first: int, last: int) -> list[JoinRequest]:
        """Returns the requests `first` to `last`."""
        values = [self.store.find(f"ask/{number}") for number in range(first, last + 1)]
        fields = {field.name for field in dataclasses.fields(JoinRequest)}
        found = [json.loads(value) for value in values if value is not None]
        return [JoinRequest(**{name: told[name] for name in told.keys() & fields}) for told in found]

    def admitted(self, answered: int, count: int, iteration: int) -> list[int]:
        """Answers the requests `answered` + 1 to `count`: returns the machines that may take part in an iteration, not too far
        behind, in their order. Deletes the keys of requests that were answered earlier, a few at a time.
        """
        if count == answered:
            return []
        new = self.requests(answered + 1, count)
        self.store.delete_later([f"ask/{number}" for number in range(answered - 15, answered + 1) if number > 0])
        close = (request.machine for request in new if iteration - _CLOSE <= request.iteration <= iteration)
        return list(dict.fromkeys(close))


def _place_and_name(value: bytes) -> tuple[int, str]:
    place, _, name = value.decode().partition(" ")
    return int(place), name
