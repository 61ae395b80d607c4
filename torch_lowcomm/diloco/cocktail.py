"""CocktailSGD (Wang et al., ICML 2023): random, top-k and 4-bit compression of every step's update."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from torch_lowcomm.diloco.inner_optimizer import OptimizerAround, parameters_of
from torch_lowcomm.reduction import Residual, all_reduce


class CocktailSGD(OptimizerAround):
    """Sends of each inner step's update every `stride`-th element, of those the largest share, in 4 bits.

        opt = lc.diloco.CocktailSGD(torch.optim.AdamW(model.parameters()), **lc.diloco.presets.cocktail())

    All ranks train the same parameters, which they begin with. The random choice is a stride whose start rolls by one a step,
    so that it needs no places; what is not chosen, cut off or rounded waits in an error vector, and what the second encoding
    loses in that of the rank that sums (the worker's and the server's error feedback). The average is applied a step late.
    It keeps 12 bytes a parameter, a third of them in host memory.

    Args:
        optimizer: The inner one: its update, not the gradient, is what is sent.
        stride: 1 / the share that is chosen at random.
        keep: Of those, the share that is sent.
        group: A lowcomm group of the ranks that average; None for the default group.

    Raises:
        TypeError: `optimizer` is no optimizer.
        ValueError: A number is out of its range, or a parameter is sharded.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        stride: int,
        keep: float,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"CocktailSGD: expected an optimizer, got {type(optimizer).__name__}")
        if not isinstance(stride, int) or isinstance(stride, bool) or stride < 1:
            raise ValueError(f"CocktailSGD: stride: expected an integer of 1 or more, got {stride!r}")
        if not 0 < keep <= 1:
            raise ValueError(f"CocktailSGD: keep: expected a share above 0, at most 1, got {keep!r}")
        self._parameters = parameters_of(optimizer)
        if any(isinstance(p, DTensor) for p in self._parameters):
            raise ValueError(
                "CocktailSGD: expected plain parameters, got a DTensor: a rank sends the whole model's update"
            )
        super().__init__(optimizer)
        self._stride, self._codec, self._group = stride, codec_text(keep), group
        self._outer = self._flat()
        self._error = torch.zeros_like(self._outer)
        self._residuals = [Residual(self._error[start::stride]) for start in range(stride)]
        self._steps = 0
        # The work (None: it has been waited for), the message or its average, and where it starts.
        self._under_way: tuple[Any, torch.Tensor, int] | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes an inner step, sends its update and applies the average of the one before.

        Returns:
            The inner step's result.
        """
        start = self._steps % self._stride
        self._steps += 1
        before = self._outer.clone()
        returned = self._inner_step(closure)
        self._error += before - self._flat()
        message = self._error[start :: self._stride].clone()
        self._error[start :: self._stride] = 0
        self._arrive()
        work = all_reduce(
            message,
            dist.ReduceOp.AVG,
            self._group,
            codec=self._codec,
            residual=self._residuals[start],
            async_op=True,
        )
        self._under_way = (work, message, start)
        self._move()
        return returned

    def finish(self) -> None:
        """Applies what is under way."""
        self._arrive()
        self._move()

    def error(self) -> torch.Tensor:
        """Returns the error vector of this rank, of all elements, after `finish`."""
        waits = self._error.clone()
        for start, residual in enumerate(self._residuals):
            waits[start :: self._stride] += residual.value
        return waits

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Returns what this rank needs to go on with the same bits, its parameters included. Each rank saves its own.

        It waits for the average under way and includes it; training goes on as without it. The tensors are copies.

        Returns:
            {"inner" (the inner optimizer's state_dict), "steps" (inner steps so far), "outer" (the parameters as one vector,
            equal on all ranks), "error" (what was not chosen, cut off or rounded by this rank; a vector likewise), "residuals"
            (by start of the stride: what coding lost), "average" (that of the last step; None before the first, and after
            `finish`)}.

        Raises:
            DistBackendError: A peer or the network failed.
        """
        if self._under_way is not None:
            work, message, start = self._under_way
            if work is not None:
                work.wait()
            self._under_way = (None, message, start)
        return {
            "inner": copy.deepcopy(self.inner.state_dict()),
            "steps": self._steps,
            "outer": self._outer.clone(),
            "error": self._error.clone(),
            "residuals": [residual.value.clone() for residual in self._residuals],
            "average": None if self._under_way is None else self._under_way[1].clone(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Loads what `state_dict` returned on this rank, and puts the parameters into the model.

        Raises:
            ValueError: The state is of another stride or model, or lacks a part; or a message is under way. Nothing has
                changed.
        """
        if self._under_way is not None and self._under_way[0] is not None:
            raise ValueError("CocktailSGD: load_state_dict: expected no message under way, got one: finish() first")
        missing = {"inner", "steps", "outer", "error", "residuals", "average"} - state_dict.keys()
        if missing:
            raise ValueError(f"CocktailSGD: load_state_dict: expected {sorted(missing)} in the state, got none")
        start = (state_dict["steps"] - 1) % self._stride
        slices = [self._error[first :: self._stride] for first in range(self._stride)]
        for name, given, expected in (
            ("outer", [state_dict["outer"]], [self._outer]),
            ("error", [state_dict["error"]], [self._error]),
            ("residuals", state_dict["residuals"], slices),
            ("average", [] if state_dict["average"] is None else [state_dict["average"]], slices[start : start + 1]),
        ):
            shapes, like = [tuple(tensor.shape) for tensor in given], [tuple(tensor.shape) for tensor in expected]
            if shapes != like and not (name == "average" and not given):
                raise ValueError(f"CocktailSGD: load_state_dict: {name}: expected shapes {like}, got {shapes}")
        self.inner.load_state_dict(copy.deepcopy(state_dict["inner"]))
        self._share_inner()
        self._steps = state_dict["steps"]
        self._outer.copy_(state_dict["outer"])
        self._error.copy_(state_dict["error"])
        for residual, value in zip(self._residuals, state_dict["residuals"], strict=True):
            residual.load_state_dict({"value": value})
        average = state_dict["average"]
        self._under_way = None if average is None else (None, average.to(self._outer.device, copy=True), start)
        self._move()

    def _flat(self) -> torch.Tensor:
        return parameters_to_vector(self._parameters).detach().clone()

    def _arrive(self) -> None:
        if self._under_way is None:
            return
        work, message, start = self._under_way
        if work is not None:
            work.wait()
        self._outer[start :: self._stride] -= message
        self._under_way = None

    def _move(self) -> None:
        with torch.no_grad():
            vector_to_parameters(self._outer.clone(), self._parameters)  # parameters become views


def codec_text(keep: float) -> str:
    """Top-k's codec: a scale for all that is kept of a slice, at most 1024."""
    return f"topk:keep={keep:.6g},values=sym4"
