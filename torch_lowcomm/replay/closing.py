"""One iteration: a machine's message goes, the others' come, and a record is agreed on (PROTOCOL.md, "An iteration")."""

from __future__ import annotations

import logging
import time

from torch_lowcomm import _C
from torch_lowcomm.replay.agreed import Agreed
from torch_lowcomm.replay.asks import Asks
from torch_lowcomm.replay.head import Head
from torch_lowcomm.replay.names import Names
from torch_lowcomm.replay.pace import Pace
from torch_lowcomm.replay.run_store import RunStore

logger = logging.getLogger("torch_lowcomm")

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

    Attributes:
        dropped: Machines whose message this one has not waited for any longer.
    """

    def __init__(self, store: RunStore, head: Head, asks: Asks, names: Names, pace: Pace, machine: int) -> None:
        self._store, self._head, self._asks, self._names = store, head, asks, names
        self._pace, self._machine = pace, machine
        self.dropped = 0

    def agree(self, core: _C.SeedReplay, message: bytes, *, lr: float, weight_decay: float) -> Agreed | None:
        """What is agreed on the core's iteration; None where the others went on without this machine.

        Raises:
            ConnectionError: The store is lost.
        """
        iteration = core.iteration
        self._store.put(f"mail/{self._machine}", message)
        deadline = time.monotonic() + self._pace.deadline_s
        wait_s = self._pace.look_again_s
        while True:
            messages, missing, asked = self._mail(core, message)
            left = deadline - time.monotonic()
            if not missing or left <= 0:
                record = core.record(list(messages.values()), lr=lr, weight_decay=weight_decay)
                self._close(iteration, record, set(messages), missing, asked)
            elif not self._head.wait(iteration, min(wait_s, left)):
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                self._head.look()
            agreed = self._head.agreed
            if agreed.iteration == iteration:
                self._pace.agreed()
                return agreed
            if agreed.iteration > iteration or self._machine not in agreed.machines:
                return None

    def _mail(self, core: _C.SeedReplay, message: bytes) -> tuple[dict[int, bytes], dict[int, str], int]:
        """Messages that have come, by machine; machines without one, and why; the number of asks."""
        others = [machine for machine in self._head.agreed.machines if machine != self._machine]
        *mails, asked = self._store.get_all([*(f"mail/{machine}" for machine in others), "asks"])
        messages, missing = {self._machine: message}, {}
        for machine, mail in zip(others, mails, strict=True):
            if mail == LEFT:
                continue
            try:
                messages[machine] = _checked(core, machine, mail)
            except ValueError as error:
                missing[machine] = str(error)
        return messages, missing, int(asked)

    def _close(self, iteration: int, record: bytes, there: set[int], missing: dict[int, str], asked: int) -> None:
        """Makes a record the iteration's, unless it has one already."""
        joined = self._asks.admitted(self._head.agreed.asked, asked, iteration + 1)
        if self._head.swap(Agreed(iteration, record, tuple(sorted(there | joined)), asked, self._machine)):
            self.dropped += len(missing)
            for machine, why in missing.items():
                name = self._names.of(machine)
                logger.warning("seed replay: iteration %d: dropped machine %r: %s", iteration, name, why)
            for machine in joined:
                logger.info("seed replay: iteration %d: let machine %r in", iteration, self._names.of(machine))


def _checked(core: _C.SeedReplay, machine: int, mail: bytes) -> bytes:
    """A machine's message of the core's iteration. ValueError: it is none, or spoilt."""
    if not mail:
        raise ValueError(f"expected a message of iteration {core.iteration}, got none")
    found, iteration, _ = _C.read_replay_message(mail)
    if (found, iteration) != (machine, core.iteration):
        raise ValueError(
            f"expected a message of machine {machine} and iteration {core.iteration}, got one of machine {found} and "
            f"iteration {iteration}"
        )
    core.record([mail], lr=0.0, weight_decay=0.0)  # checks its length, which is the codec's
    return mail
