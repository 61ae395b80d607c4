"""How machines agree on a group: in rounds, each closed by the first machine in it that is still there."""

from __future__ import annotations

import dataclasses
import math
import time

from torch_lowcomm._log import logger
from torch_lowcomm.membership.heartbeat import Heartbeat
from torch_lowcomm.membership.patient_store import PatientStore
from torch_lowcomm.membership.round_store import RoundStore

_POLL_S = 0.05  # at first


class Rounds:
    """Rounds at a store. Machines enter an open round; it is closed once, with the list of the machines in it.

    The first machine in a round closes it as soon as every living machine has entered, or has been waited for long enough;
    never with fewer than `min_machines`. If it dies, or does not close it, the next machine does. Then the machines of the round
    connect, or none of them does (`agree_to_connect`).

    A machine that trains comes to its next outer step, which may be far, before it notices that a round is open. So it is
    waited for while it makes steps. And a machine that was not in the last group does not close this round before
    one that was has come, if any is alive: it would found a group of its own beside that of the others.

    The arguments are those of `Membership`. `patience_s` is at least three signs of life, between which steps are not seen.
    A round must have closed with this machine in it `timeout_s` after a machine was last seen to enter, or after the last step
    of one that has not; that one has `patience_s` more. The machines of a closed round have as long to say that they connect.
    Methods raise ConnectionError if the store is lost or too slow, or another process has this machine's place.
    """

    def __init__(
        self,
        store: PatientStore,
        machine_id: str,
        beat: Heartbeat,
        *,
        min_machines: int,
        patience_s: float,
        timeout_s: float,
    ) -> None:
        self._store, self._id, self._beat = RoundStore(store, machine_id), machine_id, beat
        self._min_machines, self._timeout_s = min_machines, timeout_s
        self._patience_s = max(patience_s, 3 * beat.interval_s)
        self._grouped = 0  # the last round whose machines were to connect, this one among them
        self._entry: _Entry | None = None

    def enter(self, wait_s: float) -> tuple[int, list[str]] | None:
        """Enters the open round, and later rounds until one is closed with this machine in it. Returns the round's number and
        the ids in it in the order in which they entered; None after `wait_s`: call it again. It is a TimeoutError, which has
        the machines that are there, where no round has closed in time.
        """
        until = time.monotonic() + wait_s
        try:
            while time.monotonic() < until:
                self._wait_until_current()
                entry = self._entry = self._entry or self._take_place()
                members = self._store.members(entry.number) or self._close_or_give_up(entry)
                if members is None:
                    # Longer after a time: the store may be behind a slow link.
                    time.sleep(min(max(_POLL_S, (time.monotonic() - entry.began) / 20), 5 * _POLL_S))
                    continue
                self._entry = None
                if self._id in members:
                    return entry.number, members
                # else the round was closed while this machine entered
        except BaseException:
            if self._entry is not None:
                self._store.withdraw(self._entry.key, wait=False)
                self._entry = None
            raise
        return None

    def agree_to_connect(self, number: int, members: list[str]) -> list[str]:
        """Says that this machine will connect to the others of a closed round, and waits for the decision for all of them.
        Returns the machines that are gone, or have not said so within the time-out; if there are none, all connect.

        A machine may have died since it entered; those that connect to it wait for the whole time-out. So none connects if one
        is seen to be gone before. Machines may see that at different times: what is first at the store counts.
        """
        until = time.monotonic() + self._timeout_s
        self._wait_until_current()
        self._store.set_ready(number)
        while (absent := self._store.absent(number)) is None:
            seen = self._absent_by_now(number, members, late=time.monotonic() > until)
            if seen is None:
                time.sleep(_POLL_S)
            else:
                self._store.set_absent(number, seen)
            self._wait_until_current()
        if absent:
            logger.warning("membership: group %d: %s do not connect, forming another", number, absent)
        else:
            self._grouped = number
        return absent

    def _absent_by_now(self, number: int, members: list[str], *, late: bool) -> list[str] | None:
        """Returns the machines of a closed round that do not connect; [] once all have said that they do; None before."""
        if self._store.all_ready(number, members):
            return []
        again, _ = self._store.places(number + 1)  # machines that died, and came back under their ids
        silent = {
            machine for machine in self._beat.gone().intersection(members) if not self._beat.has_come_back(machine)
        }
        late_ones = self._store.unready(number, members) if late else set()
        return sorted(silent | late_ones | set(again.values()).intersection(members)) or None

    def waiting(self, number: int) -> bool:
        """Whether a living machine has entered the round after `number`, or the round was closed without this group."""
        if self._store.members(number + 1) is not None:
            return True
        here, _ = self._store.places(number + 1)
        return bool(here) and not self._beat.alive().isdisjoint(here.values())

    def _wait_until_current(self) -> None:
        """Waits for a look at the others: this machine may have been stopped, and another process may have its id by now."""
        longest_s = self._timeout_s / 2  # the site's other ranks wait for twice the time-out in all
        for _ in range(int(longest_s / _POLL_S) + 1):  # counted: a process that is stopped meanwhile has not waited
            if self._beat.is_current():
                return
            time.sleep(_POLL_S)
        raise ConnectionError(
            f"membership: expected the store to say every {3 * self._beat.interval_s:g} s (0.6 `lost_after_s`) or oftener who is "
            f"alive, it did not for {longest_s:g} s"
        )

    def _take_place(self) -> _Entry:
        number, key = self._store.take_place()
        connected, last_group, undecided = self._store.last_group(number - 1)
        now = time.monotonic()
        patient_since = now if self._grouped == connected and not undecided else math.inf
        # The machines of a round without a word wait for one another, for as long as the time-out, before they can come.
        progress = now + self._timeout_s if undecided else now
        late = self._store.not_waited_for(connected)
        return _Entry(
            number, key, last_group - late, late, began=now, progress=progress, patient_since=patient_since, told=now
        )

    def _close_or_give_up(self, entry: _Entry) -> list[str] | None:
        if not self._beat.is_current():
            return None  # who is alive it knows from before it was stopped
        now, alive = time.monotonic(), self._beat.alive()
        here, withdrawn = self._store.places(entry.number)
        living = [key for key, machine in here.items() if machine in alive]
        there = [here[key] for key in living]
        absent = alive - set(there) - withdrawn - entry.late
        missing = {machine for machine in absent if not self._beat.has_left(machine)}
        if set(there) - entry.there:
            entry.progress = max(entry.progress, now)
        # One that trains may wait for an average for as long as the time-out before it comes.
        stepped = max(map(self._beat.stepped_at, missing), default=-math.inf)
        entry.progress = max(entry.progress, stepped + self._patience_s)
        entry.there = set(there)
        if now > entry.told + self._timeout_s:
            entry.told = now
            logger.warning("membership: round %d: %s wait for %s", entry.number, there, sorted(missing) or "others")
        if entry.key not in living or len(there) < self._min_machines or self._waits(entry, there, missing):
            entry.ready_since = math.inf
        else:
            entry.ready_since = min(entry.ready_since, now)
            if now < entry.ready_since + living.index(entry.key) * self._patience_s:
                return None  # one before it closes the round
            staying = [machine for machine in there if not self._beat.has_left(machine)]
            if len(staying) >= self._min_machines:
                return self._store.close(entry.number, staying)
        if now <= entry.progress + self._timeout_s:
            return None
        return self._give_up(entry, there, missing, grace_s=max(10 * _POLL_S, 2 * (time.monotonic() - now)))

    def _waits(self, entry: _Entry, there: list[str], missing: set[str]) -> bool:
        """Whether the machines that are there wait for another one. Notes when their patience with it begins."""
        now = time.monotonic()
        others = entry.last_group - {self._id}
        if not others & missing or others & set(there):
            entry.patient_since = min(entry.patient_since, now)
        return any(now < max(entry.patient_since, self._beat.stepped_at(one)) + self._patience_s for one in missing)

    def _give_up(self, entry: _Entry, there: list[str], missing: set[str], *, grace_s: float) -> list[str]:
        """Withdraws, and raises; or returns the members where a machine closes the round that has not seen it yet. Such a
        machine, whose link is like this one's, has closed it within `grace_s`.
        """
        self._store.withdraw(entry.key, wait=True)
        until = time.monotonic() + grace_s
        while time.monotonic() < until:
            time.sleep(5 * _POLL_S)
            members = self._store.members(entry.number)
            if members is not None:
                return members
        self._entry = None
        there = [machine for machine in there if not self._beat.has_left(machine)]
        within = f"within {self._timeout_s:g} s (`timeout`)"
        if len(there) < self._min_machines:
            expected = f"{self._min_machines} machines or more (`min_machines`) {within}, got {there}"
        else:
            last = sorted(missing & entry.last_group)
            expected = f"{last}, alive and of the last group, to come or to train {within}, got neither"
        raise TimeoutError(f"membership: round {entry.number}: expected {expected}")


@dataclasses.dataclass
class _Entry:
    """This machine's place in a round. Times are by time.monotonic()."""

    number: int  # of the round
    key: str  # of the place at the store
    last_group: set[str]  # machines of the last round that connected, and of later ones that may; without late ones
    late: set[str]  # machines that were named late, and are in no group since: the others do not wait for them
    began: float  # when it entered
    progress: float  # when it last saw a machine enter, or train that has not entered
    patient_since: float  # whom it waits for, it waits for from then on
    told: float  # when it last said in the log whom it waits for
    there: set[str] = dataclasses.field(default_factory=set)  # the machines that it has seen here
    ready_since: float = math.inf  # since when no machine is to be waited for, as it has seen
