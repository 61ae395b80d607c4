"""How long a machine waits for the others' messages."""

import time

_KEPT = 0.75  # of the average, when a new measurement comes


class Pace:
    """T_apply (Just One Byte, algorithm 1), from measured times.

    It measures whole iterations, from one commit to the next. The wait for others alone would be shorter, but a machine that
    is always last would learn from it that nobody is ever late, and would drop the others the first time it is early.

    Args:
        factor: T_apply in average iterations.
        least_s: The least T_apply.
        most_s: The greatest T_apply, which holds until an iteration has been measured.
    """

    def __init__(self, factor: float, least_s: float, most_s: float) -> None:
        self._factor, self._least_s, self._most_s = factor, least_s, most_s
        self._mean_s: float | None = None
        self._last: float | None = None

    def committed(self) -> None:
        """Counts an iteration that is committed now."""
        now = time.monotonic()
        if self._last is not None:
            took = min(now - self._last, self._most_s)
            self._mean_s = took if self._mean_s is None else _KEPT * self._mean_s + (1 - _KEPT) * took
        self._last = now

    def interrupted(self) -> None:
        """Leaves the iteration under way unmeasured: this machine was away."""
        self._last = None

    @property
    def deadline_s(self) -> float:
        """T_apply, counted from a machine's own message."""
        if self._mean_s is None:
            return self._most_s
        return min(max(self._factor * self._mean_s, self._least_s), self._most_s)

    @property
    def look_again_s(self) -> float:
        """Seconds until a machine looks whether another left, or died as the last to post and before it proposed."""
        return min(max(2 * (self._mean_s or 0.5), 1.0), self._most_s)
