"""An iteration's evaluations of a user's loss at perturbed weights, in eval mode and without gradients."""

import inspect
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torch_lowcomm._modes import evaluating
from torch_lowcomm.seed_replay.estimators import ESTIMATORS
from torch_lowcomm.seed_replay.machine_ranks import MachineRanks, OneRank
from torch_lowcomm.seed_replay.options import SeedReplayOptions
from torch_lowcomm.seed_replay.perturbation import Perturbation


class Measure:
    """Evaluates losses until there are enough samples, or time is over.

    Args:
        model: The model, which is in eval mode meanwhile.
        perturbation: Perturbs its weights.
        options: The estimator that makes projected gradients of losses; the most samples of an iteration; and the time after
            which no other sample is begun. One is always taken.
        ranks: The machine's ranks; a loss is the mean of theirs.

    Attributes:
        evaluations: Number of evaluations of the loss so far.
    """

    def __init__(
        self,
        model: nn.Module,
        perturbation: Perturbation,
        options: SeedReplayOptions,
        ranks: OneRank | MachineRanks,
    ) -> None:
        self._model, self._perturbation, self._ranks = model, perturbation, ranks
        self._samples, self._seconds = options.most_samples, options.seconds
        self._estimator = ESTIMATORS[options.estimator](options.eps)
        self.evaluations = 0

    def __call__(self, closure: Callable[..., Any]) -> tuple[list[float], list[float]]:
        """Returns (losses, estimates). If the closure throws, the weights are as before."""
        begin, loss_of = time.monotonic(), _with_batch(closure)

        def evaluate(sample: int, factor: float, batch: int) -> float:
            self.evaluations += 1
            with self._perturbation.at(sample, factor):
                torch.clear_autocast_cache()  # which a region around step() keeps: casts of weights as they were before
                loss = float(loss_of(batch))
            loss = self._ranks.mean(loss, at=(self.evaluations, sample, factor))
            return loss if factor == 0 or self._perturbation.complete() else evaluate(sample, factor, batch)

        def more(taken: int) -> bool:
            if taken >= self._samples:
                return False
            if taken == 0 or self._seconds is None:
                return True
            return not self._ranks.any(time.monotonic() - begin >= self._seconds)

        with evaluating(self._model), torch.no_grad():
            try:
                found = self._estimator(evaluate, more)
            except BaseException:
                self._perturbation.restore()
                raise
        self._perturbation.put_back()
        torch.clear_autocast_cache()
        return found


def _with_batch(closure: Callable[..., Any]) -> Callable[[int], Any]:
    """Returns a closure that takes the batch's number, whether this one does or not."""
    try:
        takes = any(
            p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)
            for p in inspect.signature(closure).parameters.values()
        )
    except ValueError:  # a callable that has no signature
        takes = False
    return closure if takes else lambda _: closure()
