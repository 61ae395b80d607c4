"""Membership: groups of the machines that are alive, one after another, over a c10d store."""

import atexit
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed import DistBackendError, PrefixStore, ProcessGroup, Store

from torch_lowcomm import _C
from torch_lowcomm._copies import NotCopied
from torch_lowcomm._log import logger
from torch_lowcomm._text_difference import expect_equal
from torch_lowcomm.live import metrics
from torch_lowcomm.membership.heartbeat import Heartbeat
from torch_lowcomm.membership.machine_group import Connector, MachineGroup
from torch_lowcomm.membership.patient_store import PatientStore
from torch_lowcomm.membership.quorum import QuorumWatch
from torch_lowcomm.membership.rounds import Rounds
from torch_lowcomm.membership.site import Site

_ATTEMPTS = 10  # to form a group that connects; each may take the time-out if a machine dies meanwhile, or stands still


class Membership(NotCopied):
    """The machines at a store, each with a separate launcher. They come, go, and form groups of those that are there.

        store = dist.TCPStore("10.0.0.1", 29500, is_master=False)
        members = lc.Membership(store, "office-a", min_machines=2)
        opt = lc.DiLoCoX(inner, sync_every=100, group=members)

    A machine may be a site of several ranks, under one launcher, which come and go together: every rank makes a Membership
    with `site=`. The first rank of the site talks to the store, and the others hear from it. The death of a rank is its
    site's: the methods raise DistBackendError on the site's other ranks, whose launcher starts them again.

    The machines' own process groups are not touched. A group that lost a machine is given up, and another group is formed with
    new connections and a new epoch in every frame. A machine that was stopped and wakes up finds its old group gone, and
    enters the next one. If the store is lost, every method that needs it raises ConnectionError on every machine.

    Args:
        store: A client of the store that all machines share, under a prefix of this run.
        machine_id: Id of this machine or site, different from all others; the machine may come back under it.
        site: A process group of the ranks of this site, of any backend, with their own rendezvous; None for one process.
            Making the Membership is collective over it, and so are all methods except `leave` and `count_step`.
        min_machines: The least number of machines in a group. Where there are fewer, they wait for `timeout`.
        lost_after_s: Seconds of silence at the store after which a machine is gone; 0.6 of them must be less than `timeout`.
        patience_s: Seconds to wait for a machine that is alive, and neither comes nor makes a step; at least
            0.6 `lost_after_s`, in which steps are seen, and less than `timeout`. One that trains comes after its next outer step.
        timeout: Progress deadline of the groups, of forming a group, and of the store's answers. Steps that machines make
            before they come are progress; so an outer step must take less than `patience_s` and this where others come.
        options: Options of the groups; the policy is not used.

    Attributes:
        site: The process group of the ranks of this site, or None.
        site_timeout: Progress deadline of what the ranks of a site tell one another.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A number is wrong, a living machine already has this id, or ranks of the site give different ids.
        ConnectionError: The store is lost.
    """

    _instead = "make a new one"

    def __init__(
        self,
        store: Store,
        machine_id: str,
        *,
        site: ProcessGroup | None = None,
        min_machines: int = 1,
        lost_after_s: float = 10.0,
        patience_s: float = 120.0,
        timeout: timedelta = timedelta(minutes=5),
        options: _C.Options | None = None,
    ) -> None:
        if not isinstance(store, Store):
            raise TypeError(f"membership: store: expected a torch.distributed.Store, got {type(store).__name__}")
        if not isinstance(machine_id, str) or not machine_id:
            raise ValueError(f"membership: machine_id: expected a text, got {machine_id!r}")
        if not isinstance(min_machines, int) or min_machines < 1:
            raise ValueError(f"membership: min_machines: expected 1 or more, got {min_machines!r}")
        for name, value in (("lost_after_s", lost_after_s), ("patience_s", patience_s)):
            if not value > 0:
                raise ValueError(f"membership: {name}: expected a number above 0, got {value!r}")
        for name, waited_s in (("patience_s", patience_s), ("0.6 lost_after_s", 0.6 * lost_after_s)):
            if waited_s >= timeout.total_seconds():
                raise ValueError(
                    f"membership: {name}: expected less than the timeout, {timeout.total_seconds():.0f} s, got {waited_s:g}"
                )
        metrics.begin(os.environ, int(os.environ.get("RANK", 0)))
        self.site, self._since = site, time.time()
        # A rank of the site may wait for the others while its leader, or its own stripe, waits for another site.
        self.site_timeout = 2 * timeout
        self._site = Site(site, self.site_timeout)
        ids = self._site.all_gather(machine_id)
        if len(set(ids)) > 1:
            raise ValueError(f"membership: machine_id: expected one for all ranks of the site, got {ids} by rank")
        self._id, self._timeout_s, self._min_machines = machine_id, timeout.total_seconds(), min_machines
        self._root = store
        groups = PrefixStore("lowcomm/groups", store)
        self._connector = Connector(groups, machine_id, self._site, options or _C.Options(), timeout)
        self._beat: Heartbeat | None = None
        self._formed: MachineGroup | None = None
        self._site.told(lambda: self._lead(store, lost_after_s, min_machines=min_machines, patience_s=patience_s))
        # A thread that returns from the store or a peer after the interpreter is gone would abort the process.
        atexit.register(self._end)

    def _lead(self, store: Store, lost_after_s: float, **of_rounds: Any) -> None:
        """Begins what the first rank of a site does for the others: it asks the store, and shows signs of life."""
        self._store = PatientStore(PrefixStore("lowcomm", store.clone()), self._timeout_s)
        beats = PatientStore(PrefixStore("lowcomm", store.clone()), self._timeout_s)
        self._beat = Heartbeat(beats, self._id, lost_after_s=lost_after_s)
        self._rounds = Rounds(self._store, self._id, self._beat, timeout_s=self._timeout_s, **of_rounds)
        self.tell(0)

    @property
    def machine_id(self) -> str:
        """Id of this machine."""
        return self._id

    @property
    def formed(self) -> MachineGroup | None:
        """The group that was formed last, or None."""
        return self._formed

    def alive(self) -> set[str]:
        """Ids of the machines that show a sign of life, in the group or not."""
        return set(self._site.told(lambda: sorted(self._beat.alive())))

    def agree(self, what: str, text: str) -> None:
        """Compares a description of what all machines must run equally; the first machine's description counts.

        Args:
            what: Name of what is compared.
            text: This machine's description; of a site's ranks each may have another.

        Raises:
            ValueError: The first machine's description differs.
            DistBackendError: A rank of this site was lost.
        """
        with self._ending_on(DistBackendError):
            whole = "\n".join(dict.fromkeys(self._site.all_gather(text)))
            self._site.told(lambda: expect_equal(what, self._store.set_first(f"agreed/{what}", whole).decode(), whole))

    def first(self, what: str, text: str) -> str:
        """Returns the text that the first machine of this store gave for `what`."""
        return self._site.told(lambda: self._store.set_first(f"first/{what}", text).decode())

    def site_values(self, mine: list[int], error: Exception | None = None) -> list[list[int]]:
        """Returns the values of every rank of this site, by rank; or raises on all of them if one has an error.

        Raises:
            Exception: `error`, on the rank that gave it.
            DistBackendError: Another rank of the site had an error, or was lost.
        """
        self._site.agree(error)
        return self._site.all_gather(mine)

    def waiting(self) -> bool:
        """Whether a machine waits for the next group. This is the view of this machine; others may not have it yet."""
        formed = self._formed
        return formed is not None and self._site.told(lambda: self._rounds.waiting(formed.number))

    def set_leave_at(self, number: int, step: int) -> None:
        """Tells all machines of group `number` after which of their common steps they leave it, to let others in."""
        self._site.told(lambda: self._store.set(f"{number}/leave_at", str(step)))

    def leave_at(self, number: int) -> int | None:
        """Returns the step that `set_leave_at` told for group `number`, or None."""
        step = self._site.told(lambda: int(self._store.find(f"{number}/leave_at") or -1))
        return None if step < 0 else step

    def form(self, stripes: Sequence[int] = (0,)) -> MachineGroup:
        """Gives the last group up and forms another of the machines that are alive.

        Args:
            stripes: Numbers of the stripes that this process has backends for. Each stripe connects one process of every machine.

        Returns:
            The new group, connected.

        Raises:
            TimeoutError: There were not enough machines in time, or one of the last group is alive and neither came nor trained;
                or ten groups did not connect.
            ConnectionError: The store is lost or too slow, or another process has this machine's place.
            DistBackendError: A rank of this site was lost.
        """
        if self._formed is not None:
            self._formed.abort()
        with self._ending_on(DistBackendError, ConnectionError):
            for _ in range(_ATTEMPTS):
                # For as long as the time-out at once: the site's other ranks wait for the first one for twice as long.
                while (entered := self._site.told(lambda: self._rounds.enter(self._timeout_s))) is None:
                    pass
                number, machines = entered
                if absent := self._site.told(lambda: self._rounds.agree_to_connect(number, machines)):  # noqa: B023
                    failed = f"{absent} that do not connect"
                    continue
                try:
                    formed = self._connector.connect(number, machines, stripes)
                except DistBackendError as error:  # a machine left after it had agreed to connect
                    failed = str(error)
                    logger.warning("membership: group %d did not connect, forming another: %s", number, error)
                    continue
                self._formed = formed
                logger.info("membership: group %d: %s", number, ", ".join(machines))
                return formed
        raise TimeoutError(
            f"membership: expected one of {_ATTEMPTS} groups to connect, the last of which got: {failed}"
        )

    def count_step(self) -> None:
        """Counts a step of training. Machines that wait for this one wait as long as it makes steps."""
        if self._beat is not None:
            self._beat.count_step()

    def tell(self, outer_steps: int) -> None:
        """Tells the store how many outer steps were made and since when this machine is there, for `lowcomm status`."""
        if self._beat is not None:
            about = {"since_unix_s": self._since, "outer_steps": outer_steps}
            self._store.set_later(f"about/{self._id}", json.dumps(about))

    def watch(self, loop: _C.DiLoCoX, quorum: int, grace_s: float | None) -> QuorumWatch:
        """Starts a watch on this rank that ends groups with late machines; what does not fit is a ValueError."""
        if quorum < self._min_machines:
            raise ValueError(f"DiLoCoX: quorum: expected {self._min_machines} or more (min_machines), got {quorum}")
        if grace_s is not None and grace_s >= self._timeout_s:
            raise ValueError(f"DiLoCoX: grace_s: expected less than {self._timeout_s:g} (the timeout), got {grace_s:g}")
        return QuorumWatch(
            self._root, self._id, self._beat, loop=loop, timeout_s=self._timeout_s, quorum=quorum, grace_s=grace_s
        )

    @contextmanager
    def _ending_on(self, *errors: type[Exception]) -> Iterator[None]:
        """Where a rank of the site is lost, or this client of the store, the others need not wait for this machine."""
        try:
            yield
        except errors:
            self._end()
            raise

    def leave(self) -> None:
        """Ends this machine's part. Its group ends for the other machines too, and they form another.

        It may be called any number of times.
        """
        atexit.unregister(self._end)
        if self._beat is not None:
            self._beat.stop()
        if self._formed is not None:
            self._formed.shutdown()

    def _end(self) -> None:
        """Ends the group at the end of a process that has not called leave()."""
        if self._beat is not None:
            self._beat.stop()
        if self._formed is not None:
            self._formed.abort()
