"""How a loss at perturbed weights becomes projected gradients.

An estimator returns (losses, estimates) of an iteration's samples; `eps` is ε, how far along a direction the loss is measured.
"""

import math
import statistics
from collections.abc import Callable

# Returns the loss at w + factor·z of a sample, on a batch: (sample, factor, batch).
Evaluate = Callable[[int, float, int], float]
# Says whether another sample, counted from 0, is to be taken.
More = Callable[[int], bool]


def two_sided(evaluate: Evaluate, more: More, eps: float) -> tuple[list[float], list[float]]:
    """SPSA: (l(w + εz) − l(w − εz)) / 2ε, two evaluations each (MeZO, definition 1)."""
    losses, estimates = [], []
    while more(len(estimates)):
        sample = len(estimates)
        above, below = evaluate(sample, eps, sample), evaluate(sample, -eps, sample)
        losses.append((above + below) / 2)
        estimates.append((above - below) / (2 * eps))
    return losses, estimates


def one_sided(evaluate: Evaluate, more: More, eps: float) -> tuple[list[float], list[float]]:
    """Batched one-sided estimates whose step is divided by the losses' standard deviation, in the place of ε (FZOO, arXiv
    2506.09034): an evaluation a sample, and one more without a perturbation, all of batch 0.
    """
    start = evaluate(0, 0.0, 0)
    losses: list[float] = []
    while more(len(losses)) or len(losses) < 2:
        losses.append(evaluate(len(losses), eps, 0))
    finite = [loss for loss in losses if math.isfinite(loss)]
    deviation = statistics.stdev(finite) if len(finite) > 1 else 0.0
    return [start], [(loss - start) / deviation if deviation > 0 else loss - loss for loss in losses]


ESTIMATORS = {"two-sided": two_sided, "one-sided": one_sided}
