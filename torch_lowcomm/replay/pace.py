"""How long a machine waits for the others' messages."""

from __future__ import annotations

import time

_KEPT = 0.75  # of the average, when a new measurement comes


class Pace:
    """T_apply (Just One Byte, algorithm 1), from measured times.

    What is measured is a whole iteration, from one agreed set to the next. The wait for others alone would be shorter,
    but a machine that is always last would learn from it that nobody is ever late, and drop the others the first time
    it comes before them.

    Args:
        factor: T_apply in average iterations.
        least_s: T_apply at least.
        most_s: T_apply at most, and until something has been measured.
    """

    def __init__(self, factor: float, least_s: float, most_s: float) -> None:
        self._factor, self._least_s, self._most_s = factor, least_s, most_s
        self._mean_s: float | None = None
        self._last: float | None = None

    def agreed(self) -> None:
        """An iteration has been agreed on, now."""
        now = time.monotonic()
        if self._last is not None:
            took = min(now - self._last, self._most_s)
            self._mean_s = took if self._mean_s is None else _KEPT * self._mean_s + (1 - _KEPT) * took
        self._last = now

    def interrupted(self) -> None:
        """What is under way is no measurement: this machine was away."""
        self._last = None

    @property
    def deadline_s(self) -> float:
        """T_apply, from a machine's own message on."""
        if self._mean_s is None:
            return self._most_s
        return min(max(self._factor * self._mean_s, self._least_s), self._most_s)

    @property
    def look_again_s(self) -> float:
        """After how long to see whether somebody left, or died as the last of all and with the set unwritten."""
        return min(max(2 * (self._mean_s or 0.5), 1.0), self._most_s)
