"""The last rank calls something else than the others: as the first of them, together with them, as the last."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from faults.rank import Player


def play(player: Player) -> None:
    """The row's part of one rank."""
    r, case = player.r, player.case
    if case.when == "before" and not player.culprit:
        player.hear(f"in{case.culprit}")
    if case.when == "during":
        player.together("go")
    if case.when == "after" and player.culprit:
        player.hear_others("in")
        time.sleep(0.05)
    player.attempts(odd=case.fault if player.culprit else "", issued=lambda _: r.say(f"in{r.rank}"))
