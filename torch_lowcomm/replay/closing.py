"""One iteration: a machine's message goes, the others' come, and a record is agreed on (PROTOCOL.md, "An iteration")."""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Iterable

from torch_lowcomm import _C
from torch_lowcomm.replay.agreed import Agreed
from torch_lowcomm.replay.asks import Asks
from torch_lowcomm.replay.head import Head
from torch_lowcomm.replay.names import Names
from torch_lowcomm.replay.pace import Pace
from torch_lowcomm.replay.run_store import RunStore

logger = logging.getLogger("torch_lowcomm")

_STEP = struct.Struct("<ff")  # learning rate and weight decay, before a message
LEFT = b"left"  # in the mail of a machine that is not waited for
_LONGEST_WAIT_S = 15.0  # before looking for something else than what is waited for


class Closing:
    """Posts, looks, waits, closes.

    Args:
        store: The run's keys.
        head: Of the run.
        asks: At the store.
        names: At the store.
        pace: How long others are waited for.
        machine: This one's number.
        gone: Tells the names of those who were alive and are so no longer: nobody waits for them.
        heard: Is told the names of those who take part in an iteration: that is a sign of life.

    Attributes:
        dropped: Machines whose message this one has not waited for any longer.
    """

    def __init__(
        self,
        store: RunStore,
        head: Head,
        asks: Asks,
        names: Names,
        pace: Pace,
        machine: int,
        gone: Callable[[], set[str]],
        heard: Callable[[str], None],
    ) -> None:
        self._store, self._head, self._asks, self._names = store, head, asks, names
        self._pace, self._machine, self._gone, self._heard = pace, machine, gone, heard
        self.dropped = 0

    def agree(self, core: _C.SeedReplay, message: bytes, *, lr: float, weight_decay: float) -> Agreed | None:
        """What is agreed on the core's iteration; None where the others went on without this machine.

        Raises:
            ConnectionError: The store is lost.
        """
        iteration = core.iteration
        mail = _STEP.pack(lr, weight_decay) + message
        self._store.put(self._names.mail(self._machine), mail)
        for other in self._head.agreed.machines:  # in the last record, or let in by it
            self._heard(self._names.of(other))
        deadline = time.monotonic() + self._pace.deadline_s
        wait_s = self._pace.look_again_s
        # The last to post sees all messages, and nobody else need look: the others are told, or look after a while.
        looks = self._store.count(f"p{iteration}") >= len(self._head.agreed.machines)
        while True:
            agreed = self._head.agreed
            if agreed.iteration == iteration:
                self._pace.agreed()
                return agreed
            if agreed.iteration > iteration or self._machine not in agreed.machines:
                return None
            left = deadline - time.monotonic()
            closed = looks and self._closes(core, mail, late=left <= 0)
            if not closed and not self._head.wait(iteration, min(wait_s, left)):
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                self._head.look()
            looks = True

    def _closes(self, core: _C.SeedReplay, mail: bytes, *, late: bool) -> bool:
        """Looks, and closes the core's iteration where nobody is waited for any longer; whether that was so."""
        mails, missing, asked = self._mail(core, mail)
        if not (late or self._all_gone(missing)):
            return False
        self._close(core.iteration, _record(core, mails), mails, missing, asked)
        return True

    def _mail(self, core: _C.SeedReplay, mine: bytes) -> tuple[dict[int, bytes], dict[int, str], int]:
        """Mail with messages, by machine, those first who have been here for longest; machines without, and why; asks."""
        machines = self._head.agreed.machines
        others = [machine for machine in machines if machine != self._machine]
        *found, asked = self._store.get_all([*map(self._names.mail, others), "asks"])
        theirs = dict(zip(others, found, strict=True))
        mails, missing = {}, {}
        for machine in machines:
            mail = mine if machine == self._machine else theirs[machine]
            if mail == LEFT:
                continue
            try:
                mails[machine] = _checked(core, machine, mail)
            except ValueError as error:
                missing[machine] = str(error)
        return mails, missing, int(asked)

    def _all_gone(self, machines: Iterable[int]) -> bool:
        gone = self._gone() if machines else set()
        return all(self._names.of(machine) in gone for machine in machines)

    def _close(
        self, iteration: int, record: bytes, mails: dict[int, bytes], missing: dict[int, str], asked: int
    ) -> None:
        """Makes a record the iteration's, unless it has one already."""
        joined = self._asks.admitted(self._head.agreed.asked, asked, iteration + 1)
        machines = tuple(dict.fromkeys([*mails, *joined]))
        if self._head.swap(Agreed(iteration, record, machines, asked, self._machine)):
            self._store.delete_later([f"p{iteration - 1}"])
            self.dropped += len(missing)
            for machine, why in missing.items():
                name = self._names.of(machine)
                logger.warning("seed replay: iteration %d: dropped machine %r: %s", iteration, name, why)
            for machine in joined:
                logger.info("seed replay: iteration %d: let machine %r in", iteration, self._names.of(machine))


def _record(core: _C.SeedReplay, mails: dict[int, bytes]) -> bytes:
    """Of all messages, at the first one's learning rate: a machine that comes late may have missed a scheduler's steps."""
    lr, weight_decay = _STEP.unpack_from(next(iter(mails.values())))
    return core.record([mail[_STEP.size :] for mail in mails.values()], lr=lr, weight_decay=weight_decay)


def _checked(core: _C.SeedReplay, machine: int, mail: bytes) -> bytes:
    """A machine's mail, with a message of the core's iteration. ValueError: there is none, or it is spoilt."""
    if not mail:
        raise ValueError(f"expected a message of iteration {core.iteration}, got none")
    message = mail[_STEP.size :]
    found, iteration, _ = _C.read_replay_message(message)
    if (found, iteration) != (machine, core.iteration):
        raise ValueError(
            f"expected a message of machine {machine} and iteration {core.iteration}, got one of machine {found} and "
            f"iteration {iteration}"
        )
    core.record([message], lr=0.0, weight_decay=0.0)  # checks its length, which is the codec's
    return mail
