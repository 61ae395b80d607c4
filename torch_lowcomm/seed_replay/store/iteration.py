"""One iteration: machines post messages, and one of them proposes a record and commits it (PROTOCOL.md, "An iteration")."""

import struct
import time
from collections.abc import Iterable

from torch_lowcomm import _C
from torch_lowcomm._log import logger
from torch_lowcomm.seed_replay.store.commit import Commit
from torch_lowcomm.seed_replay.store.head import Head
from torch_lowcomm.seed_replay.store.pace import Pace
from torch_lowcomm.seed_replay.store.run import Run

_STEP = struct.Struct("<ff")  # learning rate and weight decay, before a message
LEFT = b"left"  # in the mail of a machine that has left; the others do not wait for it
_LONGEST_WAIT_S = 15.0  # for the log, before another look at the other keys


class Proposer:
    """This machine's part of every iteration: it posts, looks, and proposes or waits.

    Args:
        run: The run. Machines of it that are gone are not waited for.
        head: The last known commit, and the way to propose another.
        pace: Says how long the others are waited for.

    Attributes:
        dropped: Number of machines whose message this machine no longer waited for.
    """

    def __init__(self, run: Run, head: Head, pace: Pace) -> None:
        self._store, self._requests, self._names, self._beat, self._machine = run
        self._head, self._pace = head, pace
        self.dropped = 0

    def commit(self, core: _C.SeedReplay, message: bytes, *, lr: float, weight_decay: float) -> Commit | None:
        """Takes part in the core's iteration.

        1. Posts: sets this machine's mail and counts. The last machine of the quorum to count looks at once.
        2. Looks: reads the others' mail. If nobody is waited for any longer, proposes a record of the messages that are there.
        3. Waits for the commit in the log, and from time to time looks again.

        Returns:
            The commit, whose record need not be this machine's proposal; None if the others went on without this machine.

        Raises:
            ConnectionError: The store is lost.
        """
        iteration = core.iteration
        mail = _STEP.pack(lr, weight_decay) + message
        self._store.put(self._names.mail(self._machine), mail)
        for other in self._head.commit.quorum:  # in the last record, or let in by it
            self._beat.heard(self._names.of(other))
        deadline = time.monotonic() + self._pace.deadline_s
        wait_s = self._pace.look_again_s
        # The last machine to post sees all messages. The others need not look: they are told, or look after a while.
        looks = self._store.count(f"p{iteration}") >= len(self._head.commit.quorum)
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
        """Looks, and proposes a record if nobody is waited for any longer; returns whether it did."""
        mails, missing, requests = self._mail(core, mail)
        if not (late or self._all_gone(missing)):
            return False
        self._propose(core.iteration, _record(core, mails), mails, missing, requests)
        return True

    def _mail(self, core: _C.SeedReplay, mine: bytes) -> tuple[dict[int, bytes], dict[int, str], int]:
        """Reads the quorum's mail in one call.

        Returns:
            (mail with messages by machine, in the quorum's order; why the other machines' mail has none; number of join
            requests).
        """
        quorum = self._head.commit.quorum
        others = [machine for machine in quorum if machine != self._machine]
        *found, requests = self._store.get_all([*map(self._names.mail, others), "asks"])
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
        gone = self._beat.gone() if machines else set()
        return all(self._names.of(machine) in gone for machine in machines)

    def _propose(
        self, iteration: int, record: bytes, mails: dict[int, bytes], missing: dict[int, str], requests: int
    ) -> None:
        """Proposes a record and the next quorum: the machines in the record, then those that are let in."""
        joined = self._requests.admitted(self._head.commit.answered, requests, iteration + 1)
        quorum = tuple(dict.fromkeys([*mails, *joined]))
        if self._head.propose(Commit(iteration, record, quorum, requests, self._machine)):
            self._store.delete_later([f"p{iteration - 1}"])
            self.dropped += len(missing)
            for machine, why in missing.items():
                name = self._names.of(machine)
                logger.warning("seed replay: iteration %d: dropped machine %r: %s", iteration, name, why)
            for machine in joined:
                logger.info("seed replay: iteration %d: let machine %r in", iteration, self._names.of(machine))


def _record(core: _C.SeedReplay, mails: dict[int, bytes]) -> bytes:
    """Makes a record of all messages, at the first one's learning rate: a late machine may have missed a scheduler's steps."""
    lr, weight_decay = _STEP.unpack_from(next(iter(mails.values())))
    return core.record([mail[_STEP.size :] for mail in mails.values()], lr=lr, weight_decay=weight_decay)
