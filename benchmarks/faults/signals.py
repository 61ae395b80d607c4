"""The last rank is killed or stopped: while the others wait for it, in the middle of its part, or when that is over."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from faults.cuts import wait_for_bytes
from faults.ops import PendingOp

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
    else:
        player.attempts(issued=lambda op: _strike_under_way(player, op))


def _strike(player: Player) -> None:
    """This process is killed or stopped, here."""
    player.facts.fault_at = time.monotonic()
    player.r.say("fault", player.facts.fault_at)
    os.kill(os.getpid(), signal.SIGKILL if player.case.fault == "kill -9" else signal.SIGSTOP)
    player.facts.resumed_at = time.monotonic()


def _strike_under_way(player: Player, op: PendingOp) -> None:
    wait_for_bytes(player.case.deadline_s)
    if op.completed():
        player.facts.premature = "its part was over"
    _strike(player)


def _witness(player: Player) -> None:
    r, case = player.r, player.case
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
