"""The learning rate that fits a number of parameters, and a warning where a rate is too large."""

import math
from collections.abc import Sequence

import torch

from torch_lowcomm._log import logger

_STEP = 0.3  # the norm of a step, by that of the gradient
_TIMES = 10


def default_rate(parameters: Sequence[torch.Tensor]) -> float:
    """η = 0.3 / √d for d trained numbers, of DTensors those of all ranks.

    An estimate is about as large as the gradient's norm and a direction has the norm √d, so that a step's norm is η·√d times
    that of the gradient. The rates of the project's benchmarks are η·√d = 0.31 (seed_replay, 936 numbers), 0.66
    (seed_replay_cost, 110,000) and 0.35 (seed_replay_smollm2, 135 million).
    """
    return _STEP / math.sqrt(max(1, sum(p.numel() for p in parameters)))


class LossWatch:
    """Warns once, when the loss is ten times its first value or no number any more.

    Args:
        parameters: Those that are trained.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._default = default_rate(parameters)
        self._first: float | None = None
        self._warned = False

    def __call__(self, losses: Sequence[float], rate: float) -> float:
        """Returns the mean of an iteration's finite losses, NaN if there is none, and compares it.

        Args:
            losses: Those of this machine.
            rate: The iteration's learning rate.
        """
        finite = [loss for loss in losses if math.isfinite(loss)]
        loss = sum(finite) / len(finite) if finite else math.nan
        if self._first is None and loss > 0:
            self._first = loss
        outgrown = self._first is not None and loss > _TIMES * self._first
        if not self._warned and (outgrown or math.isnan(loss)):
            self._warn(loss, rate)
        return loss

    def _warn(self, loss: float, rate: float) -> None:
        self._warned = True
        logger.warning(
            "SeedReplay: the loss was %s in the first iteration and is %g: expected a learning rate at which it falls, got %g; "
            "lr=None takes %.2g here, 0.3 / √(trained parameters)",
            "not above 0" if self._first is None else f"{self._first:g}",
            loss,
            rate,
            self._default,
        )
