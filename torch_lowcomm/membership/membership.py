"""Membership: groups of the machines that are alive, one after another, over a c10d store."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import time
from datetime import timedelta

from torch.distributed import DistBackendError, PrefixStore, Store

from torch_lowcomm import _C
from torch_lowcomm._create import make_inner
from torch_lowcomm.membership.agreement import expect_alike
from torch_lowcomm.membership.heartbeat import Heartbeat
from torch_lowcomm.membership.patient_store import PatientStore
from torch_lowcomm.membership.rounds import Rounds

logger = logging.getLogger("torch_lowcomm")

_ATTEMPTS = 10  # at a group that connects: each may cost the time-out, where a machine died after entering


@dataclasses.dataclass(frozen=True)
class Formed:
    """A group of machines.

    Attributes:
        number: Of the group, counted at the store: each under keys of its own.
        machines: Ids by rank.
        rank: This machine's.
        backend: The group's lowcomm backend. It is no c10d process group: only optimizers of this package talk over it.
    """

    number: int
    machines: tuple[str, ...]
    rank: int
    backend: _C.LowcommBackend


class Membership:
    """The machines at a store, each a launcher of its own: they come, go, and form groups of those who are there.

        store = dist.TCPStore("10.0.0.1", 29500, is_master=False)
        members = lc.Membership(store, "office-a", least=2)
        opt = lc.DiLoCoX(inner, sync_every=100, group=members)

    Nothing of the machines' own process groups is touched. A group that lost somebody is given up and another is formed,
    with connections, and an epoch in every frame, of its own: a machine that was stopped and wakes up finds its old group
    gone, and enters the next one. The store's loss is an error on every machine.

    Args:
        store: A client of the store that all machines share, under a prefix of this run.
        machine_id: This machine's, unlike all others'; it may come back under it.
        least: The least number of machines that a group has.
        lost_after_s: A machine that has been silent at the store for so long counts as gone.
        patience_s: How long machines that are alive but do not come are waited for: after a loss they notice it with
            their next outer step.
        timeout: Progress deadline of the groups, of forming one, and of the store's answers.
        options: Of the groups; its policy is not used.

    Raises:
        TypeError: Something of another type.
        ValueError: A number that will not do; a living machine has that id.
    """

    def __init__(
        self,
        store: Store,
        machine_id: str,
        *,
        least: int = 1,
        lost_after_s: float = 10.0,
        patience_s: float = 120.0,
        timeout: timedelta = timedelta(minutes=5),
        options: _C.Options | None = None,
    ) -> None:
        if not isinstance(store, Store):
            raise TypeError(f"membership: store: expected a torch.distributed.Store, got {type(store).__name__}")
        if not isinstance(machine_id, str) or not machine_id:
            raise ValueError(f"membership: machine_id: expected a text, got {machine_id!r}")
        if not isinstance(least, int) or least < 1:
            raise ValueError(f"membership: least: expected 1 or more, got {least!r}")
        for name, value in (("lost_after_s", lost_after_s), ("patience_s", patience_s)):
            if not value > 0:
                raise ValueError(f"membership: {name}: expected a number above 0, got {value!r}")
        if patience_s >= timeout.total_seconds():
            raise ValueError(
                f"membership: patience_s: expected less than the timeout, {timeout.total_seconds():.0f} s, got {patience_s!r}"
            )
        self._groups = PrefixStore("lowcomm/groups", store)
        self._store = PatientStore(PrefixStore("lowcomm", store.clone()), timeout.total_seconds())
        self._id, self._least, self._patience_s, self._timeout = machine_id, least, patience_s, timeout
        self._options = options or _C.Options()
        beats = PatientStore(PrefixStore("lowcomm", store.clone()), timeout.total_seconds())
        self._beat = Heartbeat(beats, machine_id, lost_after_s=lost_after_s)
        self._rounds = Rounds(self._store, machine_id, self._beat.alive)
        self._formed: Formed | None = None
        # Threads that come back from the store or a peer when the interpreter is gone would end the process by an abort.
        atexit.register(self._end)

    @property
    def machine_id(self) -> str:
        """This machine's."""
        return self._id

    @property
    def formed(self) -> Formed | None:
        """The group that was formed last."""
        return self._formed

    def alive(self) -> set[str]:
        """Ids of the machines that show a sign of life, in the group or not.

        Raises:
            ConnectionError: The store is lost.
        """
        return self._beat.alive()

    def agree(self, what: str, text: str) -> None:
        """Says how this machine runs something that all must run alike; the first one to say it is right.

        Raises:
            ValueError: Another machine said something else before.
            ConnectionError: The store is lost.
        """
        expect_alike(what, self._store.set_first(f"agreed/{what}", text), text)

    def waiting(self) -> bool:
        """Whether somebody waits for the next group: this rank's view, which others need not share yet.

        Raises:
            ConnectionError: The store is lost.
        """
        if self._formed is None:
            return False
        return self._rounds.waiting(self._formed.number)

    def set_leave_at(self, number: int, step: int) -> None:
        """Says to all of group `number` after which of their common steps they give it up, for those who wait."""
        self._store.set(f"{number}/leave_at", str(step))

    def leave_at(self, number: int) -> int | None:
        """What was said so, or None."""
        step = self._store.find(f"{number}/leave_at")
        return None if step is None else int(step)

    def form(self) -> Formed:
        """Gives the last group up and forms another of the machines that are alive. Returns when it is connected.

        Raises:
            TimeoutError: There were not enough machines in time.
            ConnectionError: The store is lost.
        """
        if self._formed is not None:
            self._formed.backend.abort()
        for left in reversed(range(_ATTEMPTS)):
            deadline = time.monotonic() + self._timeout.total_seconds()
            number, machines = self._rounds.enter(least=self._least, patience_s=self._patience_s, deadline=deadline)
            try:
                self._formed = self._connected(number, machines)
            except DistBackendError as error:  # somebody left between entering and connecting
                if left == 0:
                    raise TimeoutError(f"membership: expected group {number} to connect, got: {error}") from error
                logger.warning("membership: group %d did not connect, forming another: %s", number, error)
                continue
            logger.info("membership: group %d: %s", number, ", ".join(machines))
            return self._formed
        raise AssertionError("unreachable: the last attempt returns or raises")

    def leave(self) -> None:
        """Ends this machine's part: its group ends for the others too, who form another. Any number of times."""
        atexit.unregister(self._end)
        self._beat.stop()
        if self._formed is not None:
            self._formed.backend.shutdown()

    def _end(self) -> None:
        """The process ends, and nobody has said leave()."""
        self._beat.stop()
        if self._formed is not None:
            self._formed.backend.abort()

    def _connected(self, number: int, machines: list[str]) -> Formed:
        rank = machines.index(self._id)
        backend = _C.create_backend(
            PrefixStore(str(number), self._groups),
            rank,
            len(machines),
            self._options,
            self._timeout,
            f"lowcomm-members-{number}",
            list(range(len(machines))),
            make_inner,
        )
        return Formed(number, tuple(machines), rank, backend)
