"""The part of a rank that the faults see: what they play with, and nothing of how a row is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from faults.cases import Case
from faults.facts import Facts
from faults.ops import PendingOp
from faults.stage import Notes
from faults.tap import Tap

Rank = Any  # ranks.Rank, of the tests


class Player(Protocol):
    """A rank in a row; `rank.py` implements it.

    Attributes:
        r: The rank, which says and hears notes.
        case: The row.
        notes: Those that the owner of the lab hears, or None on loopback.
        culprit: Whether this rank commits the fault.
        facts: Facts that the row collects.
        tap: The tap on this rank's frames, or None.
        frame_counts: Frames of one undisturbed op by peer.
    """

    r: Rank
    case: Case
    notes: Notes | None
    culprit: bool
    facts: Facts
    tap: Tap | None
    frame_counts: dict[int, int]

    def hear(self, what: str) -> str:
        """Waits for a note and returns its text."""

    def together(self, what: str) -> None:
        """A barrier by notes."""

    def hear_others(self, what: str) -> None:
        """Waits until all ranks except the culprit have said a note."""

    def attempt(self, *, odd: str = "", issued: Callable[[PendingOp], None] | None = None) -> bool:
        """Issues the op and notes how it ended; returns whether it succeeded."""

    def attempts(self, **first: Any) -> None:
        """Issues the op, and others after it until one fails."""

    def attempts_left(self) -> None:
        """Issues the others after the first."""
