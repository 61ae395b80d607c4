"""The last rank's link is cut before the op, while its bytes are on the way, or before the next one; and restored."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from faults.ops import PendingOp

if TYPE_CHECKING:
    from faults.rank import Player

_SHORT_S = 0.5
_UNDER_WAY = 16 << 10  # bytes across the interface, of 160 KiB and more


def play(player: Player) -> None:
    """The row's part of one rank; returns once the link is back."""
    threads: list[threading.Thread] = []
    {"before": _before, "during": _during, "after": _after}[player.case.when](player, threads)
    player.r.say(f"over{player.r.rank}")
    for thread in threads:
        thread.join()
    player.hear("restored")


def _cut(player: Player, threads: list[threading.Thread]) -> None:
    """Cuts; a thread restores, half a second later or once every rank has given up."""
    notes = player.notes
    assert notes

    def restore() -> None:
        if player.case.recovers:
            time.sleep(_SHORT_S)
        else:
            for rank in range(player.case.size):
                player.hear(f"over{rank}")
        notes.ask("restore")
        player.r.say("restored")

    notes.ask("cut")
    player.facts.fault_at = time.monotonic()
    player.r.say("fault", player.facts.fault_at)
    threads.append(threading.Thread(target=restore))
    threads[-1].start()


def _before(player: Player, threads: list[threading.Thread]) -> None:
    if player.culprit:
        _cut(player, threads)
    player.facts.fault_at = float(player.hear("fault"))
    player.attempts()


def _during(player: Player, threads: list[threading.Thread]) -> None:
    def begun(_: PendingOp) -> None:
        wait_for_bytes(player.case.deadline_s)
        _cut(player, threads)

    player.attempts(issued=begun if player.culprit else None)
    player.facts.fault_at = float(player.hear("fault"))


def _after(player: Player, threads: list[threading.Thread]) -> None:
    if not player.attempt():
        raise AssertionError(f"expected the op before the cut to succeed: {player.facts.attempts[0].message}")
    player.together("through")
    if player.culprit:
        _cut(player, threads)
    player.facts.fault_at = float(player.hear("fault"))
    player.attempts_left()


def wait_for_bytes(within_s: float) -> None:
    """Returns once some of an op that has just begun has passed this host's interface."""
    start, end = interface_bytes(), time.monotonic() + within_s
    while interface_bytes() < start + _UNDER_WAY and time.monotonic() < end:
        time.sleep(0.001)


def interface_bytes() -> int:
    """Returns the bytes that have passed this host's interface, both ways."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    fields = next(line.partition(":")[2].split() for line in lines if line.strip().startswith("eth0:"))
    return int(fields[0]) + int(fields[8])
