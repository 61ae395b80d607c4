"""Membership: groups of the machines that are alive, one after another, over a c10d store."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import time
from datetime import timedelta

from torch.distributed import DistBackendError, PrefixStore, Store

from torch_lowcomm import _C
from torch_lowcomm._create import make_gloo, make_nccl
from torch_lowcomm.membership.agreement import expect_equal
from torch_lowcomm.membership.heartbeat import Heartbeat
from torch_lowcomm.membership.patient_store import PatientStore
from torch_lowcomm.membership.rounds import Rounds

logger = logging.getLogger("torch_lowcomm")

_ATTEMPTS = 10  # to form a group that connects; each may take the time-out if a machine died after entering


@dataclasses.dataclass(frozen=True)
class MachineGroup:
    """A group of machines.

    Attributes:
        number: Number of the group, counted at the store; each group has separate keys.
        machines: Ids of the machines, by rank.
        rank: Rank of this machine.
        backend: The group's lowcomm backend. It is not a c10d process group: only optimizers of this package use it.
    """

    number: int
    machines: tuple[str, ...]
    rank: int
    backend: _C.LowcommBackend


class Membership:
    """The machines at a store, each with a separate launcher. They come, go, and form groups of those that are there.

        store = dist.TCPStore("10.0.0.1", 29500, is_master=False)
        members = lc.Membership(store, "office-a", least=2)
        opt = lc.DiLoCoX(inner, sync_every=100, group=members)

    The machines' own process groups are not touched. A group that lost a machine is given up, and another group is formed with
    new connections and a new epoch in every frame. A machine that was stopped and wakes up finds its old group gone, and
    enters the next one. If the store is lost, every machine raises ConnectionError.

    Args:
        store: A client of the store that all machines share, under a prefix of this run.
        machine_id: Id of this machine, different from all others; the machine may come back under it.
        least: The least number of machines in a group.
        lost_after_s: Seconds of silence at the store after which a machine is gone.
        patience_s: Seconds to wait for machines that are alive and do not come. After a loss they notice it with their next
            outer step.
        timeout: Progress deadline of the groups, of forming a group, and of the store's answers.
        options: Options of the groups; the policy is not used.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A number is wrong, or a living machine already has this id.
        ConnectionError: The store is lost.
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
        self._formed: MachineGroup | None = None
        # A thread that returns from the store or a peer after the interpreter is gone would abort the process.
        atexit.register(self._end)

    @property
    def machine_id(self) -> str:
        """Id of this machine."""
        return self._id

    @property
    def formed(self) -> MachineGroup | None:
        """The group that was formed last, or None."""
        return self._formed

    def alive(self) -> set[str]:
        """Ids of the machines that show a sign of life, in the group or not.

        Raises:
            ConnectionError: The store is lost.
        """
        return self._beat.alive()

    def agree(self, what: str, text: str) -> None:
        """Compares a description of what all machines must run equally; the first machine's description counts.

        Args:
            what: Name of what is compared.
            text: This machine's description.

        Raises:
            ValueError: The first machine's description differs.
            ConnectionError: The store is lost.
        """
        expect_equal(what, self._store.set_first(f"agreed/{what}", text), text)

    def waiting(self) -> bool:
        """Whether a machine waits for the next group. This is the view of this rank; others may not have it yet.

        Raises:
            ConnectionError: The store is lost.
        """
        if self._formed is None:
            return False
        return self._rounds.waiting(self._formed.number)

    def set_leave_at(self, number: int, step: int) -> None:
        """Tells all machines of group `number` after which of their common steps they leave it, to let others in."""
        self._store.set(f"{number}/leave_at", str(step))

    def leave_at(self, number: int) -> int | None:
        """Returns the step that `set_leave_at` told for group `number`, or None."""
        step = self._store.find(f"{number}/leave_at")
        return None if step is None else int(step)

    def form(self) -> MachineGroup:
        """Gives the last group up and forms another of the machines that are alive.

        Returns:
            The new group, connected.

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
        """Ends this machine's part. Its group ends for the other machines too, and they form another.

        It may be called any number of times.
        """
        atexit.unregister(self._end)
        self._beat.stop()
        if self._formed is not None:
            self._formed.backend.shutdown()

    def _end(self) -> None:
        """Ends the group at the end of a process that has not called leave()."""
        self._beat.stop()
        if self._formed is not None:
            self._formed.backend.abort()

    def _connected(self, number: int, machines: list[str]) -> MachineGroup:
        rank = machines.index(self._id)
        backend = _C.create_backend(
            PrefixStore(str(number), self._groups),
            rank,
            len(machines),
            self._options,
            self._timeout,
            f"lowcomm-members-{number}",
            list(range(len(machines))),
            make_gloo,
            make_nccl,
        )
        return MachineGroup(number, tuple(machines), rank, backend)
