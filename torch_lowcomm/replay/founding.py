"""How a run begins at a store."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch_lowcomm import _C
from torch_lowcomm.replay.agreed import Founded
from torch_lowcomm.replay.asks import Ask, Asks
from torch_lowcomm.replay.names import Names
from torch_lowcomm.replay.run_store import RunStore

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0  # for the founding, before looking who has come since; doubles


def found(
    store: RunStore,
    asks: Asks,
    names: Names,
    core: _C.SeedReplay,
    me: tuple[int, str],
    alive: Callable[[], set[str]],
    *,
    least: int,
    timeout_s: float,
) -> Founded:
    """How the run at this store began, which is agreed on first where there is none.

    A run that was interrupted goes on at a new store from the latest iteration that a machine comes with; machines that
    are behind replay that one's log.

    Args:
        store: The run's keys.
        asks: At the store.
        names: At the store.
        core: With the weights that this machine comes with, and their log.
        me: This machine's number and name.
        alive: Tells the names of the living.
        least: Machines that there must be.
        timeout_s: How long they are waited for.

    Raises:
        TimeoutError: There were too few.
        ConnectionError: The store is lost.
    """
    value = store.find("founded")
    if value is not None:
        return Founded.decode(value)
    log: bytes = core.log
    if log:
        store.put_large(f"earlier/{me[0]}", log, first=_iteration(log))
    store.put(names.mail(me[0]), b"")
    asks.ask(Ask(*me, core.iteration, core.checksum(), len(log)))
    deadline, wait_s, seen = time.monotonic() + timeout_s, _FIRST_WAIT_S, 0
    all_asks: list[Ask] = []
    while value is None:
        asked = asks.asked()
        all_asks += asks.between(seen + 1, asked)
        seen = asked
        there = {ask.machine: ask for ask in all_asks if ask.name in alive()}
        if len(there) >= least:
            value = store.set_first("founded", _founded(list(there.values()), asked).encode())
            break
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"seed replay: expected {least} machines or more to begin with, got {sorted(a.name for a in there.values())} "
                f"in {timeout_s:g} s"
            )
        value = store.wait_for("founded", wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
    founded = Founded.decode(value)
    if log and founded.source != me[0]:
        store.delete_large_later(f"earlier/{me[0]}", len(log))
    return founded


def _founded(there: list[Ask], asked: int) -> Founded:
    """Begins with the latest weights; of several machines that have such, with those that have the longest log."""
    source = max(there, key=lambda ask: (ask.iteration, ask.earlier))
    alike = [a for a in there if a.iteration < source.iteration or a.checksum == source.checksum]
    machines = tuple(sorted(ask.machine for ask in alike))
    return Founded(source.iteration, source.checksum, machines, asked, source.machine, source.earlier > 0)


def _iteration(log: bytes) -> int:
    """Of a log's first record."""
    return int.from_bytes(log[4:12], "little")
