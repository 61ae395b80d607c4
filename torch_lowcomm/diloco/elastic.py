"""An outer loop's group over time: the same ranks always, or machines that come and go, for whom it is formed again."""

from typing import Any

from torch.distributed import DistBackendError

from torch_lowcomm import _C
from torch_lowcomm._log import logger
from torch_lowcomm.membership import Membership

_ATTEMPTS = 10  # to form a group that holds


class Fixed:
    """A group of the same ranks from the first step to the last."""

    due = False  # whether the group is to be formed again

    def form(self, outer: _C.DiLoCoX) -> None:
        """Raises ValueError: there is no Membership that could form another group."""
        raise ValueError("DiLoCoX: regroup: expected group= to be a Membership, got a process group")

    def count_step(self) -> None:
        """Counts an inner step, for machines that wait for this one."""

    def stepped(self, outer_steps: int) -> None:
        """Sets `due` when the group is to be formed again after this outer step of those begun so far, equal at all sites."""

    def completed(self, report: dict[str, Any]) -> dict[str, Any]:
        """Returns a loop's report with the numbers of those that are averaged, and that are alive."""
        return {**report, "alive": report["participating"]}


class Elastic(Fixed):
    """Forms the groups of one outer loop, one after another. A lost machine ends its group at once.

    To let a waiting machine in, which rank 0 looks for, all ranks must leave the group after the same outer step (by the
    clock, sites make other numbers of inner ones). It writes this step to the store, so far ahead that no rank reaches it
    before a message that rank 0 sent later: of n + 1 outer steps, two are of the same one of n fragments, and the second needs
    the average of the first.
    """

    def __init__(self, members: Membership, fragments: int) -> None:
        self._members, self._ahead = members, 2 * fragments
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
        self._members.agree("DiLoCoX", outer.agreed)
        for left in reversed(range(_ATTEMPTS)):
            formed = self._members.form(outer.stripes)
            try:
                outer.regroup(list(formed.backends))
                self._first = outer.report["outer_steps"]
                self._look()
                return
            except DistBackendError as error:  # another machine was lost meanwhile
                if left == 0:
                    raise
                logger.warning("DiLoCoX: group %d did not hold, forming another: %s", formed.number, error)

    def count_step(self) -> None:
        """As `Fixed.count_step`."""
        self._members.count_step()

    def stepped(self, outer_steps: int) -> None:
        """As `Fixed.stepped`."""
        formed = self._members.formed
        assert formed is not None
        steps = outer_steps - self._first
        if formed.rank == 0 and self._members.leave_at(formed.number) is None and self._members.waiting():
            self._members.set_leave_at(formed.number, steps + self._ahead)
        leave_at = self._members.leave_at(formed.number)
        self.due = leave_at is not None and steps >= leave_at
        self._look()

    def _look(self) -> None:
        if self._members.site is not None:  # its ranks have looked together
            self._alive = len(self._members.alive())

    def completed(self, report: dict[str, Any]) -> dict[str, Any]:
        """As `Fixed.completed`; alive are machines with a sign of life, with sites those as of the last outer step."""
        formed = self._members.formed
        # A rank may carry no stripe.
        participating = report["participating"] if formed is None else len(formed.machines)
        alive = self._alive if self._members.site is not None else len(self._members.alive())
        return {**report, "participating": participating, "alive": alive}
