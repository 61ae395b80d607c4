"""This machine's part in a run: it comes in, for the first time or again, and takes part in iterations (PROTOCOL.md)."""

import dataclasses
import struct
import time
from collections.abc import Iterable

from torch_lowcomm import _C
from torch_lowcomm._log import logger
from torch_lowcomm.seed_replay.store.commit import Commit
from torch_lowcomm.seed_replay.store.head import Head
from torch_lowcomm.seed_replay.store.history import History
from torch_lowcomm.seed_replay.store.run import Run

_STEP = struct.Struct("<ff")  # learning rate and weight decay, before a message
LEFT = b"left"  # in the mail of a machine that has left; the others do not wait for it
_KEPT = 0.75  # of an average iteration, when a new measurement comes
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 15.0  # for the log, before another look at the other keys; doubles


class Pace:
    """T_apply (Just One Byte, algorithm 1), from measured times: of whole iterations, from one commit to the next. From the
    wait for others alone a machine that is always last would learn that none is ever late, and would drop the others the first
    time it is early. The arguments are `StoreExchangeOptions.deadline_…`.
    """

    def __init__(self, factor: float, least_s: float, most_s: float) -> None:
        self._factor, self._least_s, self._most_s = factor, least_s, most_s
        self._mean_s: float | None = None
        self._last: float | None = None

    def committed(self) -> None:
        """Counts an iteration that is committed now."""
        now = time.monotonic()
        if self._last is not None:
            took = min(now - self._last, self._most_s)
            self._mean_s = took if self._mean_s is None else _KEPT * self._mean_s + (1 - _KEPT) * took
        self._last = now

    def interrupted(self) -> None:
        """Leaves the iteration under way unmeasured: this machine was away."""
        self._last = None

    @property
    def deadline_s(self) -> float:
        """T_apply, counted from a machine's own message."""
        if self._mean_s is None:
            return self._most_s
        return min(max(self._factor * self._mean_s, self._least_s), self._most_s)

    @property
    def look_again_s(self) -> float:
        """Seconds until a machine looks whether another left, or died as the last to post and before it proposed."""
        return min(max(2 * (self._mean_s or 0.5), 1.0), self._most_s)


class Member:
    """Joins, posts, looks, and proposes or waits, as long as `pace` says. The others have `timeout_s` for an iteration.
    `dropped` counts the machines whose message this machine no longer waited for.
    """

    def __init__(self, run: Run, head: Head, history: History, pace: Pace, timeout_s: float) -> None:
        self._run, self._store, self._machine = run, run.store, run.machine
        self._head, self._history, self._pace, self._timeout_s = head, history, pace, timeout_s
        self.dropped = 0

    # ---- coming in (PROTOCOL.md, "Joining" and "Takeover") ----
    def join(self, core: _C.SeedReplay) -> Commit | None:
        """Brings the core to the present and this machine into the quorum: sends a join request, unless one has no answer yet
        or it is in already, and waits for the commit of the core's iteration, which may let it in; else begins again.

        Returns that commit, after which this machine takes part; None if it takes part in this iteration. It is a TimeoutError
        where the other machines are alive and commit nothing; other errors are those of `History.bring`.
        """
        head = self._head
        head.look()
        number, wait_s, deadline = 0, _FIRST_WAIT_S, time.monotonic() + self._timeout_s
        while True:
            self._history.bring(core)
            if core.iteration > head.commit.iteration + 1:
                head.look()  # a snapshot was further
                continue
            if self._machine in head.commit.quorum:
                return None
            if head.commit.answered >= number:  # no request yet, or it was answered with a no
                number = self._run.ask(core.iteration)
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
        alive, commit = self._run.beat.alive(), self._head.commit
        names = list(map(self._run.name_of, commit.quorum))
        if alive.isdisjoint(names):
            logger.warning("SeedReplay: iteration %d: %s are gone, going on without them", core.iteration, names)
            mine = {"quorum": (self._machine,), "leader": self._machine, "epoch": commit.epoch + 1}
            self._head.propose(dataclasses.replace(commit, **mine))
        elif time.monotonic() > deadline:
            raise TimeoutError(
                f"SeedReplay: expected {sorted(alive.intersection(names))} to let this machine in after iteration "
                f"{core.iteration}, got nothing in {self._timeout_s:g} s"
            )

    # ---- an iteration (PROTOCOL.md, "An iteration") ----
    def commit(self, core: _C.SeedReplay, message: bytes, *, lr: float, weight_decay: float) -> Commit | None:
        """Takes part in the core's iteration: posts its mail and counts, then looks at the others', at once if it is the last
        of the quorum and from time to time until the commit is in the log. If no machine is waited for it proposes a record.

        Returns the commit, whose record need not be this machine's proposal; None if the others went on without this machine.
        """
        iteration = core.iteration
        mail = _STEP.pack(lr, weight_decay) + message
        self._store.set(self._run.mail_of(self._machine), mail)
        for other in self._head.commit.quorum:  # in the last record, or let in by it
            self._run.beat.heard(self._run.name_of(other))
        deadline = time.monotonic() + self._pace.deadline_s
        wait_s = self._pace.look_again_s
        # The last machine to post sees all messages. The others need not look: they are told, or look after a while.
        looks = self._store.add(f"p{iteration}", 1) >= len(self._head.commit.quorum)
        while True:
            commit = self._head.commit
            if commit.iteration == iteration:
                self._pace.committed()
                return commit
            if commit.iteration > iteration or self._machine not in commit.quorum:
                return None
            left = deadline - time.monotonic()
            proposed = looks and self._propose_if_due(core, mail, late=left <= 0)
            if not proposed and not self._head.wait(iteration, min(wait_s, left)):
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                self._head.look()
            looks = True

    def _propose_if_due(self, core: _C.SeedReplay, mail: bytes, *, late: bool) -> bool:
        """Looks, and proposes a record if no machine is waited for any longer; returns whether it did."""
        mails, missing, requests = self._mail(core, mail)
        if not (late or self._all_gone(missing)):
            return False
        self._propose(core.iteration, _record(core, mails), mails, missing, requests)
        return True

    def _mail(self, core: _C.SeedReplay, mine: bytes) -> tuple[dict[int, bytes], dict[int, str], int]:
        """Reads the quorum's mail in one call: (that with messages by machine, in the quorum's order; why the other machines'
        has none; number of join requests).
        """
        quorum = self._head.commit.quorum
        others = [machine for machine in quorum if machine != self._machine]
        *found, requests = self._store.get_all([*map(self._run.mail_of, others), "asks"])
        theirs = dict(zip(others, found, strict=True))
        mails, missing = {}, {}
        for machine in quorum:
            mail = mine if machine == self._machine else theirs[machine]
            if mail == LEFT:
                continue
            try:
                if not mail:
                    raise ValueError(f"expected a message of iteration {core.iteration}, got none")
                core.check_message(mail[_STEP.size :], machine=machine)
                mails[machine] = mail
            except ValueError as error:
                missing[machine] = str(error)
        return mails, missing, int(requests)

    def _all_gone(self, machines: Iterable[int]) -> bool:
        gone = self._run.beat.gone() if machines else set()
        return all(self._run.name_of(machine) in gone for machine in machines)

    def _propose(
        self, iteration: int, record: bytes, mails: dict[int, bytes], missing: dict[int, str], requests: int
    ) -> None:
        """Proposes a record and the next quorum: the machines in the record, then those that are let in."""
        joined = self._run.admitted(self._head.commit.answered, requests, iteration + 1)
        quorum = tuple(dict.fromkeys([*mails, *joined]))
        if self._head.propose(Commit(iteration, record, quorum, requests, self._machine)):
            self._store.delete_later([f"p{iteration - 1}"])
            self.dropped += len(missing)
            for machine, why in missing.items():
                name = self._run.name_of(machine)
                logger.warning("SeedReplay: iteration %d: dropped machine %r: %s", iteration, name, why)
            for machine in joined:
                logger.info("SeedReplay: iteration %d: let machine %r in", iteration, self._run.name_of(machine))


def _record(core: _C.SeedReplay, mails: dict[int, bytes]) -> bytes:
    """Makes a record of all messages, at the first one's learning rate: a late machine may have missed a scheduler's steps."""
    lr, weight_decay = _STEP.unpack_from(next(iter(mails.values())))
    return core.record([mail[_STEP.size :] for mail in mails.values()], lr=lr, weight_decay=weight_decay)
