"""CocktailSGD (Wang et al., ICML 2023), a peer of outer loops: random, top-k and 4-bit compression of every step's update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import torch_lowcomm as lc


class CocktailSGD:
    """Sends of each inner step's update every `stride`-th element, of those the largest share, in 4 bits.

    All ranks train the same parameters, which they begin with. The random choice is a stride whose start rolls by one a step,
    so that it needs no places; what is not chosen, cut off or rounded waits in an error vector, and what the second encoding
    loses in that of the rank that sums (the worker's and the server's error feedback). The average is applied a step late.

    Args:
        optimizer: The inner one: its update, not the gradient, is what is sent.
        stride: 1 / the share that is chosen at random; DiLoCoX's paper has 10 (section 4.1.3).
        keep: Of those, the share that is sent; there .08 for OPT-1.3B and .04 for its 107B model.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, stride: int, keep: float) -> None:
        self.inner, self.param_groups = optimizer, optimizer.param_groups
        self.zero_grad = optimizer.zero_grad
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._stride, self._codec = stride, codec_text(keep)
        self._outer = self._flat()
        self._error = torch.zeros_like(self._outer)
        self._residuals = [lc.Residual(self._error[start::stride]) for start in range(stride)]
        self._steps = 0
        self._under_way: tuple[Any, torch.Tensor, int] | None = None  # the work, the message, and where it starts

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes an inner step, sends its update and applies the average of the one before; returns what the inner step does."""
        start = self._steps % self._stride
        self._steps += 1
        before = self._outer.clone()
        returned = self.inner.step(closure)
        self._error += before - self._flat()
        message = self._error[start :: self._stride].clone()
        self._error[start :: self._stride] = 0
        self._arrive()
        work = lc.all_reduce(
            message, dist.ReduceOp.AVG, codec=self._codec, residual=self._residuals[start], async_op=True
        )
        self._under_way = (work, message, start)
        self._move()
        return returned

    def finish(self) -> None:
        """Applies what is under way."""
        self._arrive()
        self._move()

    def _flat(self) -> torch.Tensor:
        return parameters_to_vector(self._parameters).detach().clone()

    def _arrive(self) -> None:
        if self._under_way is not None:
            work, message, start = self._under_way
            work.wait()
            self._outer[start :: self._stride] -= message
            self._under_way = None

    def _move(self) -> None:
        with torch.no_grad():
            vector_to_parameters(self._outer.clone(), self._parameters)  # parameters become views


def codec_text(keep: float) -> str:
    """Top-k's codec: a scale for all that is kept of a slice, at most 1024."""
    return f"topk:keep={keep:.6g},values=sym4"
