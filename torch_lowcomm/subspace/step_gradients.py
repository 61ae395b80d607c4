"""The gradients of one step of SubspaceAdamW, and what clipping makes of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_lowcomm import _C
from torch_lowcomm._adam_groups import inverse_of
from torch_lowcomm.diloco.parameters import local
from torch_lowcomm.subspace.weights import ConstrainedWeight, sum_slices

Weights = Sequence[ConstrainedWeight | None]  # a trained parameter each; None: it is not constrained


class StepGradients:
    """Gradients that are projected once, for clipping and step, from backward to `zero_grad`."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drops what is known of a step's gradients."""
        self._projected: tuple[list[torch.Tensor | None], list[Any]] | None = None
        self._clip: float | None = None
        self._norm: torch.Tensor | None = None

    def project(
        self, core: _C.SubspaceAdam, trained: Sequence[torch.Tensor], weights: Weights, names: Mapping[int, str]
    ) -> list[torch.Tensor | None]:
        """Returns this rank's gradients, whose coordinates the core has from here on; `names` are the parameters' by their
        id(). Collective where weights are sharded.
        """
        gradients = [None if p.grad is None else local(p.grad) for p in trained]
        for p, g in zip(trained, gradients, strict=True):
            if g is not None and g.layout != torch.strided:
                raise TypeError(f"SubspaceAdamW: {names[id(p)]}: expected a dense gradient, got one of {g.layout}")
        versions = [None if g is None else (g.data_ptr(), g._version) for g in gradients]
        if self._projected is None or versions != self._projected[1]:
            if self._clip is not None:
                raise ValueError(
                    "SubspaceAdamW: step: expected the gradients that clip_grad_norm saw, got others: clip after the last change "
                    "of gradients, or drop them by the optimizer's zero_grad"
                )
            sum_slices(weights, core.project(gradients))
            self._projected = gradients, versions  # kept alive: no other gradient can have its address
        return gradients

    def begin_clipping(self) -> None:
        """Forgets an earlier norm of the same gradients."""
        self._clip = self._norm = None

    def clip(self, norm: float, max_norm: float) -> torch.Tensor:
        """Sets the factor that makes the norm `max_norm` where it is larger; returns the norm, a float64 scalar."""
        self._clip = min(1.0, max_norm / (norm + 1e-6)) if norm == norm else norm
        self._norm = torch.tensor(norm, dtype=torch.float64)
        return self._norm

    def scale(self, grad_scale: torch.Tensor | None) -> float:
        """Returns the factor of this step's gradients, by clipping or by a gradient scaler's scale; both are a ValueError."""
        if grad_scale is None:
            return 1.0 if self._clip is None else self._clip
        if self._clip is not None:
            raise ValueError(
                "SubspaceAdamW: step: expected unscaled gradients in clip_grad_norm (call GradScaler.unscale_ before it), got "
                "scaled ones"
            )
        return inverse_of(grad_scale)

    def is_spoilt(self, found_inf: torch.Tensor | None) -> bool:
        """Whether a gradient scaler wants the step skipped, or would where it saw the other stages' gradients."""
        if found_inf is None:
            return False
        return bool(found_inf.item()) or (self._norm is not None and not bool(self._norm.isfinite()))
