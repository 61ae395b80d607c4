"""How machines agree on a group: in rounds, each closed by the first machine in it that is still there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from torch_lowcomm.membership.patient_store import PatientStore

_POLL_S = 0.05


class Rounds:
    """Rounds at a store. Machines enter an open round; it is closed once, with the list of the machines in it.

    Args:
        store: A separate client.
        machine_id: Id of this machine.
        alive: Returns the ids of the machines that are alive.
        has_left: Whether a machine among them has left meanwhile.
    """

    def __init__(
        self, store: PatientStore, machine_id: str, alive: Callable[[], set[str]], has_left: Callable[[str], bool]
    ) -> None:
        self._store, self._id, self._alive, self._has_left = store, machine_id, alive, has_left

    def enter(self, *, least: int, patience_s: float, timeout_s: float) -> tuple[int, list[str]]:
        """Enters the open round, and later rounds until one has this machine in it.

        The first machine in a round closes it as soon as every living machine has entered, or `patience_s` after it came;
        never with fewer than `least` machines. If it dies, the next machine closes the round.

        Args:
            least: Least number of machines.
            patience_s: Seconds to wait for living machines that do not enter because they have not noticed yet.
            timeout_s: Seconds until a round must have closed with this machine in it.

        Returns:
            (the round's number, the ids in it in the order in which they entered).

        Raises:
            TimeoutError: No round has closed in that time; the message has the machines that are there.
            ConnectionError: The store is lost.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            number = self._open()
            place = self._store.add(f"{number}/entered", 1)
            self._store.set(f"{number}/place/{place}", self._id)
            members = self._closed(number, place, least, time.monotonic() + patience_s, deadline)
            if members is None:
                entered = set(self._entered(number).values()) & self._alive()
                there = sorted(machine for machine in entered if not self._has_left(machine))
                raise TimeoutError(
                    f"membership: round {number}: expected {least} machines or more (`least`), and all that are alive, "
                    f"within {timeout_s:.0f} s (`timeout`), got {there}"
                )
            if self._id in members:
                return number, members
            # else the round was closed while this machine entered

    def _open(self) -> int:
        """Returns the first open round. The counter is only a hint: the closer may have died before it counted."""
        number = self._store.add("round", 0) + 1
        while self._store.find(f"{number}/members") is not None:
            number += 1
        return number

    def waiting(self, number: int) -> bool:
        """Whether a machine has entered the round after `number`."""
        return self._store.add(f"{number + 1}/entered", 0) > 0

    def _closed(self, number: int, place: int, least: int, patient_until: float, deadline: float) -> list[str] | None:
        key = f"{number}/members"
        while (closed := self._store.find(key)) is None:
            entered = self._entered(number)
            alive = self._alive()
            living = [p for p, machine in entered.items() if machine in alive]
            if living and min(living) == place:
                there = [entered[p] for p in sorted(living)]
                missing = {machine for machine in alive - set(there) if not self._has_left(machine)}
                ready = len(there) >= least and (not missing or time.monotonic() > patient_until)
                staying = [machine for machine in there if not self._has_left(machine)] if ready else []
                if len(staying) >= least:
                    closed = self._store.set_first(key, json.dumps(staying))
                    if json.loads(closed) == staying:
                        self._store.add("round", 1)
                    return json.loads(closed)
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_S)
        return json.loads(closed)

    def _entered(self, number: int) -> dict[int, str]:
        places = range(1, self._store.add(f"{number}/entered", 0) + 1)
        found = {self._store.find(f"{number}/place/{place}"): place for place in places}
        # The last place of each machine counts: a machine that gave up or died and came again has earlier places too.
        return {place: machine for machine, place in found.items() if machine is not None}
