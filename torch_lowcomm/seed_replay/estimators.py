"""How a loss at perturbed weights becomes projected gradients."""

import math
import statistics
from collections.abc import Callable

# Returns the loss at w + factor·z of a sample, on a batch: (sample, factor, batch).
Evaluate = Callable[[int, float, int], float]
# Says whether another sample, counted from 0, is to be taken.
More = Callable[[int], bool]


class _Estimator:
    """The base of the estimators. `eps`: ε, how far along a direction the loss is measured."""

    def __init__(self, eps: float) -> None:
        self._eps = eps

    def __call__(self, evaluate: Evaluate, more: More) -> tuple[list[float], list[float]]:
        """Returns (losses, estimates) of this iteration's samples."""
        raise NotImplementedError


class TwoSided(_Estimator):
    """SPSA: (l(w + εz) − l(w − εz)) / 2ε, two evaluations each (MeZO, definition 1)."""

    def __call__(self, evaluate: Evaluate, more: More) -> tuple[list[float], list[float]]:
        """See `_Estimator`."""
        losses, estimates = [], []
        while more(len(estimates)):
            sample = len(estimates)
            above, below = evaluate(sample, self._eps, sample), evaluate(sample, -self._eps, sample)
            losses.append((above + below) / 2)
            estimates.append((above - below) / (2 * self._eps))
        return losses, estimates


class OneSided(_Estimator):
    """Batched one-sided estimates whose step is divided by the losses' standard deviation (FZOO, arXiv 2506.09034).

    A sample takes one evaluation, and an iteration one more without a perturbation, all of batch 0. The deviation takes the
    place of ε.
    """

    def __call__(self, evaluate: Evaluate, more: More) -> tuple[list[float], list[float]]:
        """Returns (losses, estimates) of this iteration's samples."""
        start = evaluate(0, 0.0, 0)
        losses: list[float] = []
        while more(len(losses)) or len(losses) < 2:
            losses.append(evaluate(len(losses), self._eps, 0))
        finite = [loss for loss in losses if math.isfinite(loss)]
        deviation = statistics.stdev(finite) if len(finite) > 1 else 0.0
        return [start], [(loss - start) / deviation if deviation > 0 else loss - loss for loss in losses]


class Previous(_Estimator):
    """(l(w + εz) − the loss before) / ε: one evaluation each. Weights and batch have moved on since the loss before."""

    def __init__(self, eps: float) -> None:
        super().__init__(eps)
        self.before: float | None = None

    def __call__(self, evaluate: Evaluate, more: More) -> tuple[list[float], list[float]]:
        """Returns (losses, estimates) of this iteration's samples."""
        if self.before is None:
            self.before = evaluate(0, 0.0, 0)
        losses, estimates = [], []
        while more(len(estimates)):
            loss = evaluate(len(estimates), self._eps, len(estimates))
            estimates.append((loss - self.before) / self._eps)
            losses.append(loss)
            if math.isfinite(loss):
                self.before = loss
        return losses, estimates


ESTIMATORS = {"two-sided": TwoSided, "one-sided": OneSided, "previous": Previous}
