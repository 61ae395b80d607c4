"""Muon for a model's matrices and AdamW for the rest, as one optimizer: the inner one of MuLoCo (arXiv 2505.23725)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the layers' matrices, AdamW for embedding, head and vectors, as one optimizer.

        hidden = [p for p in model.blocks.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if all(p is not matrix for matrix in hidden)]
        opt = lc.DiLoCoX(lc.diloco.MuonAdamW(hidden, others, lr=1e-3), model=model, **lc.diloco.presets.mu_loco())

    Muon's updates are scaled to AdamW's root mean square, so that both take one learning rate.

    Args:
        hidden: Matrices: parameters with two dimensions.
        others: All other parameters.
        lr: Learning rate of both.
        weight_decay: Weight decay of both.

    Raises:
        ValueError: There are no matrices or no others, or one of the matrices is none.
    """

    def __init__(
        self,
        hidden: Iterable[torch.Tensor],
        others: Iterable[torch.Tensor],
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
    ) -> None:
        hidden, others = list(hidden), list(others)
        for parameter in hidden:
            if parameter.dim() != 2:
                raise ValueError(
                    f"MuonAdamW: hidden: expected matrices, got a parameter of shape {tuple(parameter.shape)}"
                )
        self._parts: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(hidden, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay),
        )
        super().__init__([*hidden, *others], {"lr": lr})
        self.param_groups = [group for part in self._parts for group in part.param_groups]
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Makes a step of each; returns what the closure returned."""
        returned = None
        if closure is not None:
            with torch.enable_grad():
                returned = closure()
        for part in self._parts:
            part.step()
        return returned

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned."""
        super().load_state_dict(state_dict)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises: a group would belong to neither.

        Raises:
            ValueError: Always, after construction.
        """
        if hasattr(self, "state") and self.param_groups:
            raise ValueError("MuonAdamW: add_param_group: expected the parameters that it was made with, got more")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_parts": self._parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Gives each part its groups and the common state: `load_state_dict` replaces both."""
        begin = 0
        for part in self._parts:
            end = begin + len(part.param_groups)
            part.param_groups, part.state = self.param_groups[begin:end], self.state
            begin = end
