"""An iteration's evaluations of a user's loss at perturbed weights, and the learning rate that fits them."""

import inspect
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from torch_lowcomm._log import logger
from torch_lowcomm._modes import evaluating
from torch_lowcomm.seed_replay.estimators import ESTIMATORS
from torch_lowcomm.seed_replay.machine_ranks import MachineRanks
from torch_lowcomm.seed_replay.options import SeedReplayOptions
from torch_lowcomm.seed_replay.perturbation import Perturbation

_STEP = 0.3  # the norm of a step, by that of the gradient
_TIMES = 10


class Measure:
    """Evaluates losses, the means over ranks, in eval mode and without gradients, until there are enough or time is over."""

    def __init__(
        self,
        model: nn.Module,
        perturbation: Perturbation,
        options: SeedReplayOptions,
        ranks: MachineRanks,
    ) -> None:
        self._model, self._perturbation, self._ranks = model, perturbation, ranks
        self._samples, self._seconds, self._eps = options.most_samples, options.seconds, options.eps
        self._estimator = ESTIMATORS[options.estimator]
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
                found = self._estimator(evaluate, more, self._eps)
            except BaseException:
                self._perturbation.restore()
                raise
        self._perturbation.put_back()
        torch.clear_autocast_cache()
        return found


def _with_batch(closure: Callable[..., Any]) -> Callable[[int], Any]:
    try:
        takes = any(
            p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)
            for p in inspect.signature(closure).parameters.values()
        )
    except ValueError:  # a callable that has no signature
        takes = False
    return closure if takes else lambda _: closure()


def default_rate(parameters: Sequence[torch.Tensor]) -> float:
    """η = 0.3 / √d for d trained numbers, of DTensors those of all ranks. A step's norm is then η·√d times that of the
    gradient. The rates of the project's benchmarks are η·√d = 0.31 (seed_replay, 936 numbers), 0.66 (seed_replay_cost,
    110,000) and 0.35 (seed_replay_smollm2, 135 million).
    """
    return _STEP / math.sqrt(max(1, sum(p.numel() for p in parameters)))


class LossWatch:
    """Warns once, when the loss is ten times its first value or no number any more. `parameters`: those that are trained."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._default = default_rate(parameters)
        self._first: float | None = None
        self._warned = False

    def __call__(self, losses: Sequence[float], rate: float) -> float:
        """Returns the mean of an iteration's finite losses of this machine, NaN if there is none, and compares it."""
        finite = [loss for loss in losses if math.isfinite(loss)]
        loss = sum(finite) / len(finite) if finite else math.nan
        if self._first is None and loss > 0:
            self._first = loss
        outgrown = self._first is not None and loss > _TIMES * self._first
        if not self._warned and (outgrown or math.isnan(loss)):
            self._warned = True
            logger.warning(
                "SeedReplay: the loss was %s in the first iteration and is %g: expected a learning rate at which it falls, got "
                "%g; lr=None takes %.2g here, 0.3 / √(trained parameters). Or the closure's loss differs from call to call",
                "not above 0" if self._first is None else f"{self._first:g}",
                loss,
                rate,
                self._default,
            )
        return loss
