"""How a machine comes into a run, for the first time or again (PROTOCOL.md, "Joining" and "Takeover")."""

import dataclasses
import time

from torch_lowcomm import _C
from torch_lowcomm._log import logger
from torch_lowcomm.seed_replay.store.catch_up import CatchUp
from torch_lowcomm.seed_replay.store.commit import Commit
from torch_lowcomm.seed_replay.store.founding import Founding
from torch_lowcomm.seed_replay.store.head import Head
from torch_lowcomm.seed_replay.store.join_requests import JoinRequest
from torch_lowcomm.seed_replay.store.run import Run

_FIRST_WAIT_S = 1.0  # for the log, before another look at the other keys; doubles
_LONGEST_WAIT_S = 15.0


class Joiner:
    """Sends join requests and follows the other machines until it is let in.

    Args:
        run: The run.
        head: The last known commit, and the way to propose another.
        catch_up: Brings weights to the present.
        founding: How the run began.
        timeout_s: How long the others may take for an iteration.
    """

    def __init__(self, run: Run, head: Head, catch_up: CatchUp, founding: Founding, timeout_s: float) -> None:
        self._store, self._requests, self._names, self._beat, self._machine = run
        self._head, self._catch_up, self._founding, self._timeout_s = head, catch_up, founding, timeout_s

    def join(self, core: _C.SeedReplay) -> Commit | None:
        """Brings the core to the present and this machine into the quorum.

        1. Brings the core to the present.
        2. Sends a join request, unless one of this machine's has no answer yet or the machine is in the quorum already.
        3. Waits for the commit of the core's iteration, which may let this machine in; else begins again.

        Returns:
            The commit of the core's iteration, after which this machine takes part; None if it takes part in this iteration.

        Raises:
            TimeoutError: The other machines are alive and commit nothing.
            ValueError: The run has other weights or another iteration, as `CatchUp.bring` says; RuntimeError and
                ReplayMismatch too.
            ConnectionError: The store is lost.
        """
        head = self._head
        head.look()
        number, wait_s, deadline = 0, _FIRST_WAIT_S, time.monotonic() + self._timeout_s
        while True:
            self._catch_up.bring(core, self._founding, head.commit)
            if core.iteration > head.commit.iteration + 1:
                head.look()  # a snapshot was further
                continue
            if self._machine in head.commit.quorum:
                return None
            if head.commit.answered >= number:  # no request yet, or it was answered with a no
                self._store.put(self._names.mail(self._machine), b"")
                number = self._requests.send(JoinRequest(self._machine, self._names.of(self._machine), core.iteration))
            if head.wait(core.iteration, wait_s):
                if self._machine in head.commit.quorum:
                    return head.commit
                deadline = time.monotonic() + self._timeout_s
                continue
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            head.look()
            if head.commit.iteration < core.iteration:
                self._take_over_or_wait(core, deadline)

    def _take_over_or_wait(self, core: _C.SeedReplay, deadline: float) -> None:
        """Replaces the quorum of the core's iteration with this machine if all machines in it are gone."""
        alive, commit = self._beat.alive(), self._head.commit
        names = [self._names.of(machine) for machine in commit.quorum]
        if alive.isdisjoint(names):
            logger.warning("seed replay: iteration %d: %s are gone, going on without them", core.iteration, names)
            mine = {"quorum": (self._machine,), "leader": self._machine, "epoch": commit.epoch + 1}
            self._head.propose(dataclasses.replace(commit, **mine))
        elif time.monotonic() > deadline:
            raise TimeoutError(
                f"seed replay: expected {sorted(alive.intersection(names))} to let this machine in after iteration "
                f"{core.iteration}, got nothing in {self._timeout_s:g} s"
            )
