"""Ends the group of an outer loop whose quorum has come to an outer step for which others are late."""

import math
import threading
import time
from collections import deque

from torch.distributed import PrefixStore, Store

from torch_lowcomm import _C
from torch_lowcomm._log import logger
from torch_lowcomm.membership.heartbeat import Heartbeat
from torch_lowcomm.membership.machine_group import MachineGroup
from torch_lowcomm.membership.patient_store import PatientStore
from torch_lowcomm.membership.round_store import RoundStore

_UNKNOWN_S = 10.0  # grace before an interval has passed
_LEAST_S = 1.0  # of a grace that follows the interval: less is a link's jitter
_SHARE = 0.1  # of an interval


class QuorumWatch:
    """A thread of every rank of a machine that looks whether its loop waits for late machines.

    Each machine tells with its signs of life how many outer steps it has begun. Where a loop waits for one that `quorum`
    machines have begun, and others have not `grace_s` after the last of these, or show no sign of life, the first rank names
    them at the store: once for each group, so that all machines leave the same ones behind. Every rank that finds some named
    there ends its connections of the group: the loop's call raises DistBackendError, and the machines form another group
    without waiting for them (Rounds). A machine that is named does the same, and comes to a later round.

    `beat` is None on a rank that is not its machine's first; `grace_s` None is a tenth of the time between two outer steps, at
    least one second, and ten seconds before it is known.
    """

    def __init__(
        self,
        store: Store,
        machine_id: str,
        beat: Heartbeat | None,
        *,
        loop: _C.DiLoCoX,
        timeout_s: float,
        quorum: int,
        grace_s: float | None,
    ) -> None:
        self._store = RoundStore(PatientStore(PrefixStore("lowcomm", store.clone()), timeout_s), machine_id)
        self._id, self._beat, self._loop, self._quorum, self._given_s = machine_id, beat, loop, quorum, grace_s
        self._group: MachineGroup | None = None
        self._since = math.inf  # when the quorum was there for the outer step that is waited for
        self._waited_for = (0, 0)
        self._begun, self._begun_at, self._timeout_s = 0, 0.0, timeout_s
        self._intervals: deque[float] = deque(maxlen=5)  # seconds between two outer steps
        self._lock = threading.Lock()
        self.late: set[str] = set()  # machines that were named, and are not in a group again
        if beat is not None:
            beat.place = self._place
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lowcomm-quorum", daemon=True)
        self._thread.start()

    @property
    def grace_s(self) -> float:
        """Seconds for which the quorum waits for others."""
        if self._given_s is not None:
            return self._given_s
        wanted_s = max(_LEAST_S, _SHARE * min(self._intervals)) if self._intervals else _UNKNOWN_S
        return min(wanted_s, self._timeout_s / 2)

    def enter(self, group: MachineGroup | None) -> None:
        """This machine has connected to a group; None: it has given its last one up."""
        with self._lock:
            self._group = group
        if group is None:
            return
        self.late -= set(group.machines)
        if self.late and self._beat is not None:
            self._store.set_behind(group.number, sorted(self.late))
        if len(group.machines) < self._quorum:
            logger.warning("DiLoCoX: quorum=%d: waiting for all of %s", self._quorum, ", ".join(group.machines))

    def stop(self) -> None:
        """Ends the thread, and its part in the signs of life."""
        self._stop.set()
        if self._beat is not None and self._beat.place == self._place:
            self._beat.place, self._beat.pace_s = None, math.inf
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2.0)

    def _place(self) -> tuple[int, int]:
        group = self._group
        return (0, 0) if group is None else (group.number, self._loop.begun)

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._pace_s()):
                group, awaited = self._group, self._loop.awaited
                self._measure()
                if group is None or awaited == 0:
                    continue
                late = self._store.late(group.number) or self._named(group, awaited)
                with self._lock:
                    ends = bool(late) and self._group is group
                    self._group = None if ends else self._group
                if ends:
                    self.late |= set(late) - {self._id}
                    group.abort()
        except Exception as error:  # whatever it is, it would be lost with this thread
            logger.error("DiLoCoX: quorum: late machines are waited for from now on: %s", error)

    def _pace_s(self) -> float:
        pace_s = min(max(0.1, self.grace_s / 4), 1.0)
        if self._beat is not None:
            self._beat.pace_s = pace_s
        return pace_s

    def _measure(self) -> None:
        begun, now = self._loop.begun, time.monotonic()
        if begun == self._begun + 1 and self._begun:
            self._intervals.append(now - self._begun_at)
        if begun != self._begun:
            self._begun, self._begun_at = begun, now

    def _named(self, group: MachineGroup, awaited: int) -> list[str]:
        """Names the machines that are late, if the quorum has waited for long enough, and returns those that are named."""
        if self._beat is None or not self._beat.is_current():
            return []
        now, alive = time.monotonic(), self._beat.alive()
        if self._waited_for != (group.number, awaited):
            self._waited_for, self._since = (group.number, awaited), math.inf
        late = [
            machine
            for machine in group.machines
            if machine != self._id and (machine not in alive or self._beat.place_of(machine) < self._waited_for)
        ]
        if not late or len(group.machines) - len(late) < self._quorum:
            self._since = math.inf
            return []
        self._since = min(self._since, now)
        if now - self._since < self.grace_s:
            return []
        named = self._store.name_late(group.number, late)
        late_s, without = now - self._since, ", ".join(named)
        text = "DiLoCoX: outer step %d of group %d: going on without %s, late by %.1f s"
        logger.warning(text, awaited, group.number, without, late_s)
        return named
