"""Steps to a target loss, read from the curves of `convergence subspace`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def falling(loss: Sequence[float]) -> list[float]:
    """The curve nearest to another, in least squares, that never rises: neighbours that rise become their mean.

    Batches are harder or easier than others, for all runs of a seed at the same step; the first point at a target would be one
    of an easy batch.
    """
    blocks: list[tuple[float, int]] = []  # value, points
    for value in loss:
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] < blocks[-1][0]:
            (a, points_a), (b, points_b) = blocks[-2:]
            blocks[-2:] = [((a * points_a + b * points_b) / (points_a + points_b), points_a + points_b)]
    return [value for value, points in blocks for _ in range(points)]


def steps_to(steps: Sequence[int], loss: Sequence[float], target: float) -> float | None:
    """The step at which a curve is at a target for the first time, between two points by a straight line; None: never."""
    for i, (step, value) in enumerate(zip(steps, loss, strict=True)):
        if value <= target:
            if i == 0 or value == target:
                return float(step)
            return steps[i - 1] + (step - steps[i - 1]) * (loss[i - 1] - target) / (loss[i - 1] - value)
    return None


def loss_at(steps: Sequence[int], losses: Sequence[float], step: float) -> float | None:
    """A curve's value at a step, by a straight line between two points; None before the first and behind the last one."""
    if not steps[0] <= step <= steps[-1]:
        return None
    for (a, at_a), (b, at_b) in itertools.pairwise(zip(steps, losses, strict=True)):
        if step <= b:
            return at_a + (at_b - at_a) * (step - a) / (b - a)
    return losses[-1]
