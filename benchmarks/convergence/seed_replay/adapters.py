"""Low-rank adapters (Hu et al.: LoRA, arXiv 2106.09685): W·x + (α/r)·B·A·x with W frozen, A and B trained."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class LoRALinear(nn.Module):
    """A linear layer with an adapter; at first it gives what the layer gives, as B is zero (section 4.1).

    Args:
        layer: It is frozen.
        rank: r.
        scale: α/r.
        draw: Of A, whose elements are normal with the variance 1/in_features.
    """

    def __init__(self, layer: nn.Linear, rank: int, scale: float, draw: torch.Generator) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.scale = scale
        a = torch.randn(rank, layer.in_features, generator=draw) / math.sqrt(layer.in_features)
        self.a = nn.Parameter(a)  # [rank, in]
        self.b = nn.Parameter(torch.zeros(layer.out_features, rank))  # [out, rank]

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out)."""
        return self.layer(x) + x @ self.a.T @ self.b.T * self.scale


def adapt(model: nn.Module, rank: int, *, scale: float = 1.0, seed: int = 0) -> nn.Module:
    """Freezes a model and puts an adapter on each linear layer in it; equal seeds give equal adapters. Returns the model."""
    draw = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    linear = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if isinstance(child, nn.Linear)
    ]
    for module, name, child in linear:
        setattr(module, name, LoRALinear(child, rank, scale, draw))
    return model
