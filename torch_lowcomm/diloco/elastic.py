"""An outer loop's group over time: the same ranks always, or machines that come and go, for whom it is formed again."""

import weakref
from typing import Any

from torch.distributed import DistBackendError

from torch_lowcomm import _C
from torch_lowcomm._log import logger
from torch_lowcomm.diloco.options import DiLoCoXOptions
from torch_lowcomm.live.account import note
from torch_lowcomm.membership import Membership
from torch_lowcomm.membership.quorum import QuorumWatch

_ATTEMPTS = 10  # to form a group that holds
_NOTED = ("outer_steps", "sync_every", "participating", "alive", "late")


class Fixed:
    """A group of the same ranks from the first step to the last."""

    due = False  # whether the group is to be formed again

    def form(self, outer: _C.DiLoCoX) -> None:
        """Raises ValueError: there is no Membership that could form another group."""
        raise ValueError("DiLoCoX: regroup: expected group= to be a Membership, got a process group")

    def step(self, outer: _C.DiLoCoX, samples: float) -> None:
        """Makes the outer steps that are due after an inner step; sets `due` as it is at all sites."""
        if outer.step(samples):
            self._note(outer)

    def _note(self, outer: _C.DiLoCoX) -> None:
        report = self.completed(outer.report)
        note("DiLoCoX", **{name: report[name] for name in _NOTED})

    def finish(self, outer: _C.DiLoCoX) -> None:
        """Ends training."""
        outer.finish()

    def completed(self, report: dict[str, Any]) -> dict[str, Any]:
        """Returns a loop's report with the numbers of those that are averaged, and that are alive, and those that are late."""
        return {**report, "alive": report["participating"], "late": []}


class Elastic(Fixed):
    """Forms the groups of one outer loop, one after another. A lost machine ends its group at once.

    To let a waiting machine in, which rank 0 looks for, all ranks must leave the group after the same outer step (by the
    clock, sites make other numbers of inner ones). It writes this step to the store, so far ahead that no rank reaches it
    before a message that rank 0 sent later: of n + 1 outer steps, two are of the same one of n fragments, and the second needs
    the average of the first.

    With a quorum it does so itself, also where machines are late or lost: then no call raises for them.
    """

    def __init__(self, members: Membership, outer: _C.DiLoCoX, options: DiLoCoXOptions) -> None:
        self._members, self._ahead = members, 2 * options.fragments
        self._watch: QuorumWatch | None = None
        if options.quorum is not None:
            self._watch = members.watch(outer, options.quorum, options.grace_s)
            weakref.finalize(self, self._watch.stop)  # at the end of the process too
        self._first = 0  # outer steps before this group
        self._alive = 0
        self.due = False

    def form(self, outer: _C.DiLoCoX) -> None:
        """Forms a group of the machines that are alive, with the state of the most advanced one, as `DiLoCoX.regroup` says."""
        if self.due:
            self.due = False
            try:
                outer.quiesce()  # else messages of one rank are lost when another closes its connections
            except DistBackendError as error:
                logger.warning("DiLoCoX: lost a machine while letting others in: %s", error)
        if self._watch is not None:
            self._watch.enter(None)
        self._members.agree("DiLoCoX", outer.agreed)
        for left in reversed(range(_ATTEMPTS)):
            formed = self._members.form(outer.stripes)
            if self._watch is not None:
                self._watch.enter(formed)
            try:
                outer.regroup(list(formed.backends))
                self._first = outer.report["outer_steps"]
                self._look()
                return
            except DistBackendError as error:  # another machine was lost meanwhile
                if left == 0:
                    raise
                logger.warning("DiLoCoX: group %d did not hold, forming another: %s", formed.number, error)

    def step(self, outer: _C.DiLoCoX, samples: float) -> None:
        """As `Fixed.step`."""
        self._members.count_step()
        try:
            if outer.step(samples):
                self._stepped(outer)
        except DistBackendError as error:
            self._heal(outer, error)
        if self.due and self._watch is not None:
            self.form(outer)

    def finish(self, outer: _C.DiLoCoX) -> None:
        """As `Fixed.finish`."""
        healed = False
        while True:
            try:
                return outer.finish(healed)
            except DistBackendError as error:
                self._heal(outer, error)
                healed = True  # what was under way is lost with the group

    def _heal(self, outer: _C.DiLoCoX, error: DistBackendError) -> None:
        if self._watch is None:
            raise error
        logger.warning("DiLoCoX: forming another group: %s", error)
        self.form(outer)

    def _stepped(self, outer: _C.DiLoCoX) -> None:
        """Looks whether the group is to be formed again after this outer step, and tells of it."""
        formed = self._members.formed
        assert formed is not None
        steps = outer.report["outer_steps"] - self._first
        if formed.rank == 0 and self._members.leave_at(formed.number) is None and self._members.waiting():
            self._members.set_leave_at(formed.number, steps + self._ahead)
        leave_at = self._members.leave_at(formed.number)
        self.due = leave_at is not None and steps >= leave_at
        self._look()
        self._note(outer)
        note("membership", machine=self._members.machine_id, group=formed.number, machines=list(formed.machines))
        self._members.tell(outer.report["outer_steps"])

    def _look(self) -> None:
        if self._members.site is not None:  # its ranks have looked together
            self._alive = len(self._members.alive())

    def completed(self, report: dict[str, Any]) -> dict[str, Any]:
        """As `Fixed.completed`; alive are machines with a sign of life, with sites those as of the last outer step."""
        formed = self._members.formed
        # A rank may carry no stripe.
        participating = report["participating"] if formed is None else len(formed.machines)
        alive = self._alive if self._members.site is not None else len(self._members.alive())
        late = sorted(self._watch.late) if self._watch is not None else []
        return {**report, "participating": participating, "alive": alive, "late": late}
