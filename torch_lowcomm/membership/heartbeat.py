"""Tells which machines at a store still show a sign of life."""

import contextlib
import math
import re
import secrets
import threading
import time
from collections.abc import Callable

from torch_lowcomm._log import logger
from torch_lowcomm.membership.patient_store import PatientStore

_LEFT = "left"  # in the place of a machine's count, once it has left
# Behind a machine's count: that of its steps, and the group and outer step that it has come to (QuorumWatch).
_BEHIND = re.compile(r"(?: steps (\d+))?(?: at (\d+)\.(\d+))?$")


class Heartbeat:
    """Counts up at the store, by a separate client, and watches the other machines count, on a separate thread.

    A machine is alive while its number has changed within `lost_after_s` seconds by this machine's clock, unless it says that
    it has left. Clocks of different machines are never compared, and while this machine is stopped no other one grows old. An
    id that a living machine has is a ValueError; methods that need the store raise ConnectionError if it is lost.
    """

    def __init__(self, store: PatientStore, machine_id: str, *, lost_after_s: float) -> None:
        self._store, self._id, self._lost_after_s = store, machine_id, lost_after_s
        self._nonce = secrets.token_hex(4)
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[str, float]] = {}  # id: (its last number, when this number was new)
        self._steps = 0
        self.place: Callable[[], tuple[int, int]] | None = (
            None  # the group and the outer step that this machine has come to
        )
        self.pace_s = math.inf  # seconds between two signs of life, where less than `interval_s`
        self._places: dict[str, tuple[int, int]] = {}  # the others'
        self._stepped: dict[str, tuple[int, float]] = {}  # id: (its last number of steps, when it was seen to grow)
        self._watched = -math.inf  # when the other machines were last looked at
        self._ids: dict[int, str] = {}  # number: value of `id/<number>`, which does not change
        self._failed: Exception | None = None
        self._stop = threading.Event()
        self._expect_alone()
        self._beat(0)
        self._store.set(f"id/{self._store.add('ids', 1)}", machine_id)
        self._watch()
        self._thread = threading.Thread(target=self._loop, name="lowcomm-heartbeat", daemon=True)
        self._thread.start()

    def alive(self) -> set[str]:
        """Ids of the machines that are alive, including this one."""
        self._expect_store()
        with self._lock:
            now = self._watched
            present = {
                m for m, (value, at) in self._seen.items() if now - at < self._lost_after_s and not is_last(value)
            }
            return {self._id} | present

    def gone(self) -> set[str]:
        """Ids of the machines that were alive and have left, or been silent for `lost_after_s`."""
        with self._lock:
            now = self._watched
            lost = {m for m, (value, at) in self._seen.items() if now - at >= self._lost_after_s or is_last(value)}
            return lost - {self._id}

    def has_left(self, machine: str) -> bool:
        """Asks the store whether a machine says that it has left, which `alive` knows only later."""
        return is_last(self._said(machine))

    def has_come_back(self, machine: str) -> bool:
        """Asks the store whether a machine that `gone` has shows a sign of life again, which `gone` knows only later."""
        with self._lock:
            before, _ = self._seen[machine]
        value = self._said(machine)
        return value not in ("", before) and not is_last(value)

    def heard(self, machine: str) -> None:
        """Counts another message of a machine as a sign of life."""
        with self._lock:
            if machine in self._seen:
                self._seen[machine] = (self._seen[machine][0], time.monotonic())

    def is_current(self) -> bool:
        """Whether the other machines were looked at a moment ago; not so after this machine was stopped. It is a
        ConnectionError where another process has taken this machine's place, or this machine has left.
        """
        self._expect_store()
        if self._stop.is_set():
            raise ConnectionError(f"membership: expected machine {self._id!r} to be at the store, it has left")
        return time.monotonic() - self._watched < 3 * self.interval_s

    def count_step(self) -> None:
        """Counts a step of this machine, which the others see with its next sign of life."""
        self._steps += 1

    def stepped_at(self, machine: str) -> float:
        """When a machine was last seen to have made a step, by time.monotonic(); -inf if never."""
        with self._lock:
            return self._stepped.get(machine, (0, -math.inf))[1]

    def place_of(self, machine: str) -> tuple[int, int]:
        """The group and the outer step that another machine was last seen to have come to; (0, 0) if none."""
        with self._lock:
            return self._places.get(machine, (0, 0))

    def in_place(self) -> bool:
        """Whether no other process has taken this one's place."""
        there = self._said(self._id)
        return not there or there.startswith(self._nonce)

    def stop(self) -> None:
        """Ends the signs of life, and tells the others, who need not wait for silence. It may be called any number of times,
        and returns even if the store does not answer.
        """
        self._stop.set()
        for _ in range(5):  # in slices: a process that was stopped and wakes up has not waited
            self._thread.join(timeout=self.interval_s)  # longer only where the store does not answer
            if not self._thread.is_alive():
                return

    def _expect_store(self) -> None:
        if self._failed is not None:
            raise ConnectionError(str(self._failed)) from self._failed

    def _said(self, machine: str) -> str:
        """Returns a machine's last sign of life at the store, "" where there is none."""
        return (self._store.find(beat_key(machine)) or b"").decode()

    def _expect_alone(self) -> None:
        """Raises if another process counts under this id. The number of a machine that died does not change."""
        before = self._said(self._id)
        if not before:
            return
        deadline = time.monotonic() + self._lost_after_s
        while time.monotonic() < deadline:
            if self._said(self._id) != before:
                raise ValueError(
                    f"membership: machine_id: expected one that no living machine has, got {self._id!r}: another process "
                    "is at the store under it"
                )
            time.sleep(self.interval_s)

    @property
    def interval_s(self) -> float:
        """Seconds between two signs of life, and between two looks at the others'."""
        return self._lost_after_s / 5

    def _beat(self, count: int | str) -> None:
        if count != 0 and not self.in_place():
            raise ConnectionError(
                f"membership: lost the place of machine_id {self._id!r} at the store: another process has taken it"
            )
        steps = f" steps {self._steps}" if self._steps and count != _LEFT else ""
        place = " at {}.{}".format(*self.place()) if self.place is not None and count != _LEFT else ""
        self._store.set(beat_key(self._id), f"{self._nonce}:{count}{steps}{place}")

    def _watch(self) -> None:
        """Reads new ids once each, and all counts in one call, because this is sent all the time."""
        asked = time.monotonic()
        for number in range(1, self._store.add("ids", 0) + 1):
            if number not in self._ids and (found := self._store.find(f"id/{number}")) is not None:
                self._ids[number] = found.decode()  # else the machine has its number and has not set its id yet
        machines = list(dict.fromkeys(self._ids.values()))
        values = self._store.get_all(list(map(beat_key, machines)))
        now = time.monotonic()
        for machine, value in zip(machines, map(bytes.decode, values), strict=True):
            with self._lock:
                steps, *place = steps_and_place(value)
                self._places[machine] = tuple(place)
                if machine not in self._seen or self._seen[machine][0] != value:
                    self._seen[machine] = (value, now)
                before, at = self._stepped.get(machine, (steps, -math.inf))
                self._stepped[machine] = (steps, now if steps > before else at)
        # Where this machine was stopped in between, the answers may be old: who is silent counts as of the question, and a number
        # that is new from now on.
        self._watched = asked

    def _loop(self) -> None:
        count = 0
        try:
            while not self._stop.wait(min(self.pace_s, self.interval_s)):
                count += 1
                self._beat(count)
                self._watch()
        except Exception as error:  # whatever it is, it would be lost with this thread
            logger.error("%s", error)
            self._failed = error
            return
        with contextlib.suppress(ConnectionError):  # then the others go by its silence
            self._beat(_LEFT)


def beat_key(machine: str) -> str:
    """The key of a machine's signs of life."""
    return f"beat/{machine}"


def is_last(value: str) -> bool:
    """Whether a sign of life is a machine's last one."""
    return value.endswith(f":{_LEFT}")


def steps_and_place(value: str) -> tuple[int, ...]:
    """The steps that a machine had made by a sign of life, and the group and outer step that it had come to, where it says so."""
    found = _BEHIND.search(value)
    return tuple(int(part or 0) for part in (found.groups() if found else ("", "", "")))
