"""Asks to take part: who wants to, and which weights it has."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from torch_lowcomm.replay.run_store import RunStore

_CLOSE = 16  # iterations that a machine may be behind when it is let in: it replays them faster than they are made


@dataclasses.dataclass(frozen=True)
class Ask:
    """What a machine says of itself.

    Attributes:
        machine: Its number.
        name: Its name.
        iteration: That its weights are before.
        checksum: Of its weights, where no run has been founded yet.
        earlier: Bytes of records of earlier iterations that it has put at the store.
    """

    machine: int
    name: str
    iteration: int
    checksum: int = 0
    earlier: int = 0


class Asks:
    """Keys `asks`, a number, and `ask/<1 … asks>`. Who died between the two leaves a number without an ask."""

    def __init__(self, store: RunStore) -> None:
        self._store = store

    def ask(self, ask: Ask) -> int:
        """Asks; returns the ask's number."""
        number = self._store.count("asks")
        self._store.put(f"ask/{number}", json.dumps(dataclasses.asdict(ask)).encode())
        return number

    def asked(self) -> int:
        """How many asks there are."""
        return int(self._store.find("asks") or 0)

    def between(self, first: int, last: int) -> list[Ask]:
        """Asks `first` to `last`."""
        values = [self._store.find(f"ask/{number}") for number in range(first, last + 1)]
        return [Ask(**_checked(json.loads(value))) for value in values if value is not None]

    def admitted(self, answered: int, asked: int, iteration: int) -> list[int]:
        """Numbers of the machines that may take part in an iteration, of those whose asks are not answered yet, in their order.

        The answered asks' keys are deleted by and by.
        """
        if asked == answered:
            return []
        new = self.between(answered + 1, asked)
        self._store.delete_later([f"ask/{number}" for number in range(answered - 15, answered + 1) if number > 0])
        close = (ask.machine for ask in new if iteration - _CLOSE <= ask.iteration <= iteration)
        return list(dict.fromkeys(close))


def _checked(told: dict[str, Any]) -> dict[str, Any]:
    return {field.name: told[field.name] for field in dataclasses.fields(Ask) if field.name in told}
