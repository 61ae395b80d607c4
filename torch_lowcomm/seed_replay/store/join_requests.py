"""Join requests: which machines want to take part, and which weights they have."""

import dataclasses
import json

from torch_lowcomm.seed_replay.store.keys import RunStore

_CLOSE = 16  # iterations that a machine may be behind when it is let in: it replays them faster than they are made


@dataclasses.dataclass(frozen=True)
class JoinRequest:
    """A machine's description of itself. The fields are the names in the JSON at the store.

    Attributes:
        machine: Its number.
        name: Its name.
        iteration: The iteration that its weights are before.
        checksum: Checksum of its weights, before the founding.
        earlier: Bytes of records of earlier iterations that it has put to the store, before the founding.
    """

    machine: int
    name: str
    iteration: int
    checksum: int = 0
    earlier: int = 0


class JoinRequests:
    """The keys `asks`, a number, and `ask/<1 … asks>`. A machine that died between the two left a number without a request."""

    def __init__(self, store: RunStore) -> None:
        self._store = store

    def send(self, request: JoinRequest) -> int:
        """Puts a request to the store and returns its number."""
        number = self._store.count("asks")
        self._store.put(f"ask/{number}", json.dumps(dataclasses.asdict(request)).encode())
        return number

    def count(self) -> int:
        """Returns how many requests there are."""
        return int(self._store.find("asks") or 0)

    def between(self, first: int, last: int) -> list[JoinRequest]:
        """Returns the requests `first` to `last`."""
        values = [self._store.find(f"ask/{number}") for number in range(first, last + 1)]
        fields = {field.name for field in dataclasses.fields(JoinRequest)}
        found = [json.loads(value) for value in values if value is not None]
        return [JoinRequest(**{name: told[name] for name in told.keys() & fields}) for told in found]

    def admitted(self, answered: int, count: int, iteration: int) -> list[int]:
        """Answers the requests that have no answer yet: returns the machines that may take part in an iteration.

        Deletes the keys of requests that were answered earlier, a few at a time.

        Args:
            answered: Number of requests with an answer.
            count: Number of requests.
            iteration: The iteration to take part in. A machine that is too far behind is not let in.

        Returns:
            Numbers of machines, in the order of their requests.
        """
        if count == answered:
            return []
        new = self.between(answered + 1, count)
        self._store.delete_later([f"ask/{number}" for number in range(answered - 15, answered + 1) if number > 0])
        close = (request.machine for request in new if iteration - _CLOSE <= request.iteration <= iteration)
        return list(dict.fromkeys(close))
