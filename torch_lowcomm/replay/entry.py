"""How a machine comes in, for the first time or again (PROTOCOL.md, "Coming and going")."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable

from torch_lowcomm import _C
from torch_lowcomm.replay.agreed import Agreed, Founded
from torch_lowcomm.replay.asks import Ask, Asks
from torch_lowcomm.replay.catch_up import CatchUp
from torch_lowcomm.replay.head import Head
from torch_lowcomm.replay.names import Names
from torch_lowcomm.replay.run_store import RunStore

logger = logging.getLogger("torch_lowcomm")

_FIRST_WAIT_S = 1.0  # before looking for something else than what is waited for; doubles
_LONGEST_WAIT_S = 15.0


class Entry:
    """Asks, follows the others, and is let in.

    Args:
        store: The run's keys.
        head: Of the run.
        asks: At the store.
        names: At the store.
        catch_up: Brings weights to the present.
        founded: How the run began.
        machine: This one's number.
        alive: Tells the names of the living.
        timeout_s: How long the others may take for an iteration.
    """

    def __init__(
        self,
        store: RunStore,
        head: Head,
        asks: Asks,
        names: Names,
        catch_up: CatchUp,
        founded: Founded,
        machine: int,
        alive: Callable[[], set[str]],
        timeout_s: float,
    ) -> None:
        self._store, self._head, self._asks, self._names = store, head, asks, names
        self._catch_up, self._founded, self._machine = catch_up, founded, machine
        self._alive, self._timeout_s = alive, timeout_s

    def enter(self, core: _C.SeedReplay) -> Agreed | None:
        """Brings the core to the present, and this machine in.

        Returns:
            What is agreed on the core's iteration, after which this machine takes part; None where it does so now.

        Raises:
            TimeoutError: The others live and agree on nothing.
            ValueError, RuntimeError, ReplayMismatch: As CatchUp.bring.
            ConnectionError: The store is lost.
        """
        head = self._head
        head.look()
        number, wait_s, deadline = 0, _FIRST_WAIT_S, time.monotonic() + self._timeout_s
        while True:
            self._catch_up.bring(core, self._founded, head.agreed)
            if core.iteration > head.agreed.iteration + 1:
                head.look()  # a snapshot was further
                continue
            if self._machine in head.agreed.machines:
                return None
            if head.agreed.asked >= number:  # none yet, or answered with a no
                self._store.put(self._names.mail(self._machine), b"")
                number = self._asks.ask(Ask(self._machine, self._names.of(self._machine), core.iteration))
            if head.wait(core.iteration, wait_s):
                if self._machine in head.agreed.machines:
                    return head.agreed
                deadline = time.monotonic() + self._timeout_s
                continue
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            head.look()
            if head.agreed.iteration < core.iteration:
                self._take_over_or_wait(core, deadline)

    def _take_over_or_wait(self, core: _C.SeedReplay, deadline: float) -> None:
        """The machines of the core's iteration do not come to its end: are they all gone?"""
        alive, agreed = self._alive(), self._head.agreed
        names = [self._names.of(machine) for machine in agreed.machines]
        if alive.isdisjoint(names):
            logger.warning("seed replay: iteration %d: %s are gone, going on without them", core.iteration, names)
            mine = {"machines": (self._machine,), "closer": self._machine, "takeovers": agreed.takeovers + 1}
            self._head.swap(dataclasses.replace(agreed, **mine))
        elif time.monotonic() > deadline:
            raise TimeoutError(
                f"seed replay: expected {sorted(alive.intersection(names))} to let this machine in after iteration "
                f"{core.iteration}, got nothing in {self._timeout_s:g} s"
            )
