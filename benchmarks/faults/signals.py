"""The last rank is killed or stopped: while the others wait for it, in the middle of its part, or when that is over."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

from faults.ops import PendingOp
from faults.tap import Frame

if TYPE_CHECKING:
    from faults.rank import Player


def play(player: Player) -> None:
    """The row's part of one rank."""
    if not player.culprit:
        _witness(player)
    elif player.case.when == "before":
        player.hear_others("in")
        time.sleep(0.05)
        _strike(player)
        player.attempts()
    elif player.case.when == "after":
        player.attempt()
        _strike(player)
        player.attempts_left()
    elif player.tap:
        _struck_at_a_frame(player)
    else:
        _struck_without_rank_0(player)


def _strike(player: Player) -> None:
    """This process is killed or stopped, here."""
    player.facts.fault_at = time.monotonic()
    player.r.say("fault", player.facts.fault_at)
    os.kill(os.getpid(), signal.SIGKILL if player.case.fault == "kill -9" else signal.SIGSTOP)
    player.facts.resumed_at = time.monotonic()


def _struck_at_a_frame(player: Player) -> None:
    once = threading.Lock()  # frames to several peers are on their way at the same time

    def act(frame: Frame) -> list[Frame]:
        if once.acquire(blocking=False):
            _strike(player)
        return [frame]

    assert player.tap
    player.tap.arm(player.frame_counts, "during", act)
    player.together("armed")
    player.attempts()


def _struck_without_rank_0(player: Player) -> None:
    """Gloo has no frames to count: rank 0 comes after the fault, so that this rank's part cannot be over."""

    def begun(op: PendingOp) -> None:
        time.sleep(0.1)
        if op.completed():
            player.facts.premature = "its part was over although rank 0 had not come"
        _strike(player)

    player.attempts(issued=begun)


def _witness(player: Player) -> None:
    r, case = player.r, player.case
    if case.tapped:
        player.together("armed")
    elif case.when == "during" and r.rank == 0:
        player.hear("fault")
    if case.when == "after":
        if player.attempt():
            player.hear("fault")
            player.attempts_left()
    else:
        player.attempts(issued=lambda _: r.say(f"in{r.rank}"))
    player.facts.fault_at = float(player.hear("fault"))
    r.say(f"over{r.rank}")
    if case.fault == "SIGSTOP" and r.rank == 0:
        player.hear_others("over")
        os.kill(int(player.hear(f"pid{case.culprit}")), signal.SIGCONT)
