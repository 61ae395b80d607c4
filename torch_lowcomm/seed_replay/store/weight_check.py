"""Compares this machine's weights with those of one other machine."""

import random
import time

from torch_lowcomm import _C
from torch_lowcomm.seed_replay.exchange import ReplayMismatch
from torch_lowcomm.seed_replay.store.run import Run

_POLL_S = 0.01


def other_weights(run: Run, core: _C.SeedReplay, machines: list[int], *, wait_s: float) -> ReplayMismatch | None:
    """Compares checksums with one of `machines`, drawn at random; all machines call it after the same iterations.

    A machine that is gone, or that does not send its checksum in time, is not compared with.

    Args:
        run: The run.
        core: The core that has this machine's weights.
        machines: The machines of the last record.
        wait_s: Seconds to wait for the other machine's checksum.

    Returns:
        The error if the weights differ, else None. Nobody knows which machine has the wrong weights.

    Raises:
        ConnectionError: The store is lost.
    """
    store, machine, mine, iteration = run.store, run.machine, core.checksum(), core.iteration
    store.put(f"sum/{machine}", f"{iteration} {mine}".encode())
    others = [other for other in machines if other != machine]
    if not others:
        return None
    peer = random.choice(others)
    name = run.names.of(peer)
    deadline = time.monotonic() + wait_s
    while True:
        at, theirs = map(int, (store.find(f"sum/{peer}") or b"-1 0").split())
        if at == iteration and mine != theirs:
            return ReplayMismatch(
                f"seed replay: expected the same weights as machine {name!r} at iteration {iteration}, with checksum "
                f"{theirs:#010x}, got {mine:#010x}"
            )
        if at >= iteration or name in run.beat.gone() or time.monotonic() > deadline:
            return None
        time.sleep(_POLL_S)
