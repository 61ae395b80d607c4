"""An optimizer around an optimizer: in its place for schedulers, gradient scalers and checkpoints."""

from collections import UserDict
from collections.abc import Callable
from typing import Any

import torch

from torch_lowcomm._adam_groups import inverse_of
from torch_lowcomm._copies import NotCopied


class OptimizerAround(NotCopied, torch.optim.Optimizer):
    """Shares the parameter groups, state and defaults of `inner`, an optimizer, and makes its steps."""

    inner: torch.optim.Optimizer

    # With this attribute a gradient scaler also calls step() for a step that it skips. Ranks that skip a step and ranks that
    # do not then have the same count of steps; else the last outer step would wait for ever.
    _step_supports_amp_scaling = True

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        # Sets the attributes of torch's own optimizers that its schedulers and profilers need.
        super().__init__([torch.zeros(())], {})
        self.inner = inner
        self._share_inner()

    def __getattr__(self, name: str) -> Any:
        """What an optimizer has beyond torch's: the `train` and `eval` of schedule-free ones, which trainers ask for."""
        if name.startswith("_") or name == "inner":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.inner, name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Calls the inner optimizer's zero_grad."""
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ValueError after construction: the ranks have agreed on the parameters."""
        if not hasattr(self, "inner"):
            return super().add_param_group(param_group)
        raise ValueError(
            "DiLoCoX: add_param_group: expected the parameters that it was made with, got more: add them to the inner "
            "optimizer first and make a new one"
        )

    def _inner_step(self, closure: Callable[[], Any] | None) -> Any:
        """Makes an inner step, unless a gradient scaler skips it; returns the step's result."""
        scale, infinities = getattr(self, "grad_scale", None), getattr(self, "found_inf", 0.0)
        if float(infinities) > 0:
            return None
        if scale is not None:
            inverse = inverse_of(scale)
            for parameter in parameters_of(self.inner):
                if parameter.grad is not None:
                    parameter.grad.mul_(inverse)
        return self.inner.step(closure) if closure is not None else self.inner.step()

    def load_inner(self, state_dict: dict[str, Any]) -> None:
        """Loads a state into the inner optimizer."""
        try:
            self.inner.load_state_dict(state_dict)
        finally:
            self._share_inner()

    def _share_inner(self) -> None:
        """Takes the inner optimizer's groups, which its `load_state_dict` replaces, and shows its state."""
        self.param_groups = self.inner.param_groups
        self.state = StateOf(self.inner)  # type: ignore[assignment]
        self.defaults = self.inner.defaults


class StateOf(UserDict):
    """An optimizer's state, that is never false: where one is false torch makes a step with gradients and learning rates of 0,
    to fill it before it loads a checkpoint, and the outer loop would count that step. Its own states have all that they need.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def data(self) -> Any:  # type: ignore[override]
        """The optimizer's present state, which its `load_state_dict` replaces."""
        return self._optimizer.state

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        return self.data[parameter]  # makes the item of a defaultdict, which `get` must not

    def get(self, parameter: torch.Tensor, default: Any = None) -> Any:
        """The parameter's state where there is one."""
        return self.data.get(parameter, default)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Returns all parameters of an optimizer, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"]]
