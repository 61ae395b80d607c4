"""A frame of the last rank's is spoilt on its way: the first of the op, a middle one, the last."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from faults.tap import SPOILT, Frame

if TYPE_CHECKING:
    from faults.rank import Player


def play(player: Player) -> None:
    """The row's part of one rank."""

    def act(frame: Frame) -> list[Frame]:
        player.r.say("fault", time.monotonic())
        return SPOILT[player.case.fault](frame)

    if player.tap:
        player.tap.arm(player.frame_counts, player.case.when, act)
    player.together("armed")
    player.attempts()
    player.facts.fault_at = float(player.hear("fault"))
