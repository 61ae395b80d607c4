"""Steps to a target loss, read from the curves of `convergence subspace`."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Curves = Sequence[Mapping[str, Any]]  # name, seed, step and loss by point; a run and seed each

FREE = "free"
LEAKS = 1.25  # validation over training loss; 2.3 of gauss4, whose buckets are two tokens, and below 1.02 of others that learn


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


def keeps_its_loss(curve: Mapping[str, Any]) -> bool:
    """Whether a run's model has, by exact messages, about the loss that it trained to by its own.

    Where a code mixes tokens, the rounding of one tells of later ones, and a model reads it; where a code is coarse, a model may
    work with its rounding alone. Neither loss is one of the model.
    """
    return bool(curve["validation"] < LEAKS * curve["loss"][-1])


def validation(curves: Curves, name: str) -> float:
    """A run's validation loss by exact messages over the free run's of the same seed, the mean over seeds."""
    free = {curve["seed"]: curve["validation"] for curve in curves if curve["name"] == FREE}
    of_name = [curve for curve in curves if curve["name"] == name and curve["seed"] in free]
    return statistics.mean(curve["validation"] / free[curve["seed"]] for curve in of_name)


def of_runs(curves: Curves, share: float, names: Iterable[str]) -> dict[str, float | None]:
    """Mean steps of runs to the loss that the free run of the same seed has at a share (0 to 1) of its steps, by name; a run
    without curves is left out. None where a seed does not reach its target, or a run's loss is not its model's
    (`keeps_its_loss`).
    """
    free = {curve["seed"]: curve for curve in curves if curve["name"] == FREE}
    found: dict[str, float | None] = {}
    for name in names:
        steps = []
        for curve in (curve for curve in curves if curve["name"] == name and curve["seed"] in free):
            base = free[curve["seed"]]
            at = max(0, round(share * len(base["step"])) - 1)
            reached = steps_to(curve["step"], falling(curve["loss"]), falling(base["loss"])[at])
            steps.append(reached if keeps_its_loss(curve) else None)
        if steps:
            found[name] = None if None in steps else statistics.mean(step for step in steps if step is not None)
    return found
