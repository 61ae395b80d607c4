"""An outer loop over machines that come and go: when its group is formed anew."""

from __future__ import annotations

import logging

from torch.distributed import DistBackendError

from torch_lowcomm import _C
from torch_lowcomm.membership import Membership

logger = logging.getLogger("torch_lowcomm")

_ATTEMPTS = 10  # at a group that holds


class Elastic:
    """The groups of one outer loop.

    Those who are lost end a group by themselves. For those who wait to be let in all ranks must leave it at the same point:
    rank 0 looks for them, and names one so far ahead at the store that no rank can be there before it has got a message
    that rank 0 sent after that. Of every fragment there is one sending and one arrival an interval.

    Args:
        members: Who is alive.
        fragments: Of the outer loop.
    """

    def __init__(self, members: Membership, fragments: int) -> None:
        self._members, self._ahead = members, 4 * fragments
        self._steps = 0  # of this group in which a fragment sent or arrived
        self.due = False

    def form(self, outer: _C.DiLoCoX) -> None:
        """A new group of who is alive, and the state of the most advanced one on all of them."""
        if self.due:
            try:
                outer.quiesce()  # or what one rank has sent is lost on the way when another closes its connections
            except DistBackendError as error:
                logger.warning("DiLoCoX: lost a machine while letting others in: %s", error)
        self._members.agree("DiLoCoX", outer.agreed)
        for left in reversed(range(_ATTEMPTS)):
            formed = self._members.form()
            self._steps, self.due = 0, False
            try:
                outer.regroup(formed.backend)
                return
            except DistBackendError as error:  # one more was lost meanwhile
                if left == 0:
                    raise
                logger.warning("DiLoCoX: group %d did not hold, forming another: %s", formed.number, error)

    def stepped(self) -> None:
        """After an outer step.

        Raises:
            ConnectionError: The store is lost.
        """
        formed = self._members.formed
        assert formed is not None
        self._steps += 1
        if formed.rank == 0 and self._members.leave_at(formed.number) is None and self._members.waiting():
            self._members.set_leave_at(formed.number, self._steps + self._ahead)
        leave_at = self._members.leave_at(formed.number)
        self.due = leave_at is not None and self._steps >= leave_at

    def alive(self) -> int:
        """Machines with a sign of life."""
        return len(self._members.alive())
