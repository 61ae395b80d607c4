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


class Previous:
    """(l(w + εz) − the loss before) / ε: one evaluation each. Weights and batch have moved on since the loss before."""

    def __init__(self) -> None:
        self._before: float | None = None

    def __call__(self, evaluate: Evaluate, more: More, eps: float) -> tuple[list[float], list[float]]:
        """As the module says."""
        if self._before is None:
            self._before = evaluate(0, 0.0, 0)
        losses, estimates = [], []
        while more(len(estimates)):
            loss = evaluate(len(estimates), eps, len(estimates))
            estimates.append((loss - self._before) / eps)
            losses.append(loss)
            if math.isfinite(loss):
                self._before = loss
        return losses, estimates


# Each makes the estimator of one optimizer.
ESTIMATORS = {"two-sided": lambda: two_sided, "one-sided": lambda: one_sided, "previous": Previous}
