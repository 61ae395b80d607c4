"""How machines agree on a group: in rounds, each closed by the first machine in it that is still there."""

from __future__ import annotations

import json
import math
import time

from torch_lowcomm.membership.heartbeat import Heartbeat
from torch_lowcomm.membership.patient_store import PatientStore

_POLL_S = 0.05  # at first


class Rounds:
    """Rounds at a store. Machines enter an open round; it is closed once, with the list of the machines in it.

    The first machine in a round closes it as soon as every living machine has entered, or has been waited for long enough;
    never with fewer than `least` machines. If it dies, the next machine closes the round.

    A machine that trains comes to its next outer step, which may be far, before it notices that a round is open. So it is
    waited for while it makes steps. And a machine that was not in the last round does not close this one before
    one that was has come, if any is alive: it would found a group of its own beside that of the others.

    Args:
        store: A separate client.
        machine_id: Id of this machine.
        beat: Tells which machines are alive, and when they made their last steps.
        least: Least number of machines.
        patience_s: Seconds that a living machine is waited for without a step.
        timeout_s: Seconds until a round must have closed with this machine in it, or since the last step of a living machine
            that has not come; that one has `patience_s` more.
    """

    def __init__(
        self,
        store: PatientStore,
        machine_id: str,
        beat: Heartbeat,
        *,
        least: int,
        patience_s: float,
        timeout_s: float,
    ) -> None:
        self._store, self._id, self._beat = store, machine_id, beat
        self._least, self._patience_s, self._timeout_s = least, patience_s, timeout_s
        self._began: float | None = None  # by time.monotonic(), as all times here: this machine wants to be in a round
        self._number = 0  # of the round that it has entered
        self._place: int | None = None  # there
        self._last_group: set[str] = set()  # machines of the round before
        self._patient_since = math.inf  # whom it waits for, it waits for from then on
        self._grouped = 0  # the last round that was closed with this machine in it

    def enter(self, wait_s: float) -> tuple[int, list[str]] | None:
        """Enters the open round, and later rounds until one is closed with this machine in it.

        Args:
            wait_s: Seconds after which it returns in any case.

        Returns:
            (the round's number, the ids in it in the order in which they entered); None: call it again.

        Raises:
            TimeoutError: No round has closed in time; the message has the machines that are there.
            ConnectionError: The store is lost.
        """
        self._began = self._began or time.monotonic()
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            if self._place is None:
                self._take_place()
            members = self._closed() or self._close_or_give_up()
            if members is None:
                waited = time.monotonic() - self._began
                time.sleep(min(max(_POLL_S, waited / 20), 5 * _POLL_S))  # the store may be behind a slow link
                continue
            self._place = None
            if self._id in members:
                self._began, self._grouped = None, self._number
                return self._number, members
            # else the round was closed while this machine entered
        return None

    def waiting(self, number: int) -> bool:
        """Whether a machine has entered the round after `number`."""
        return self._store.add(f"{number + 1}/entered", 0) > 0

    def _take_place(self) -> None:
        self._number = self._open()
        self._place = self._store.add(f"{self._number}/entered", 1)
        self._store.set(f"{self._number}/place/{self._place}", self._id)
        last = self._store.find(f"{self._number - 1}/members")
        self._last_group = set() if last is None else set(json.loads(last))
        self._patient_since = time.monotonic() if self._grouped == self._number - 1 else math.inf

    def _open(self) -> int:
        """Returns the first open round. The counter is only a hint: the closer may have died before it counted."""
        number = self._store.add("round", 0) + 1
        while self._store.find(f"{number}/members") is not None:
            number += 1
        return number

    def _closed(self) -> list[str] | None:
        closed = self._store.find(f"{self._number}/members")
        return None if closed is None else json.loads(closed)

    def _close_or_give_up(self) -> list[str] | None:
        alive, entered = self._beat.alive(), self._entered()
        # One that died and came again has several places, of which the last counts.
        living = {place: machine for machine, place in _last_places(entered).items() if machine in alive}
        there = [living[place] for place in sorted(living)]
        missing = alive - set(there)
        closes = bool(living) and min(living) == self._place
        if closes and len(there) >= self._least and not self._waits(there, missing):
            staying = [machine for machine in there if not self._beat.has_left(machine)]
            if len(staying) >= self._least:
                return self._close(staying)
        if time.monotonic() > self._deadline(missing):
            return self._give_up(entered, there, missing)
        return None

    def _waits(self, there: list[str], missing: set[str]) -> bool:
        """Whether this machine, which may close the round, waits for another one first."""
        missing = {machine for machine in missing if not self._beat.has_left(machine)}
        now = time.monotonic()
        others = self._last_group - {self._id}
        if not others & missing or others & set(there):
            self._patient_since = min(self._patient_since, now)
        return any(now < max(self._patient_since, self._beat.stepped_at(one)) + self._patience_s for one in missing)

    def _close(self, members: list[str]) -> list[str]:
        closed = json.loads(self._store.set_first(f"{self._number}/members", json.dumps(members)))
        if closed == members:
            self._store.add("round", 1)
        return closed

    def _deadline(self, missing: set[str]) -> float:
        assert self._began is not None
        stepped = max(map(self._beat.stepped_at, missing), default=-math.inf)
        return max(self._began, stepped + self._patience_s) + self._timeout_s

    def _give_up(self, entered: dict[int, str], there: list[str], missing: set[str]) -> list[str]:
        """Withdraws: nobody may wait for this machine to close the round. Returns the members if somebody has."""
        for place, machine in entered.items():
            if machine == self._id:
                self._store.set(f"{self._number}/place/{place}", "")
        members = self._closed()
        if members is None:
            self._began = self._place = None
            there = [machine for machine in there if not self._beat.has_left(machine)]
            raise TimeoutError(
                f"membership: round {self._number}: expected {self._least} machines or more (`least`) within "
                f"{self._timeout_s:.0f} s (`timeout`), got {there}"
                + (f"; alive, and neither there nor training: {sorted(missing)}" if missing else "")
            )
        return members

    def _entered(self) -> dict[int, str]:
        """The machines in this round, by place."""
        places = range(1, self._store.add(f"{self._number}/entered", 0) + 1)
        found = {place: self._store.find(f"{self._number}/place/{place}") for place in places}
        return {place: machine for place, machine in found.items() if machine}


def _last_places(entered: dict[int, str]) -> dict[str, int]:
    return {machine: place for place, machine in sorted(entered.items())}
