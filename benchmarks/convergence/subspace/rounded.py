"""Boundaries of free decoders that the library does not have: rounded numbers of all dimensions, a token by itself.

What crosses them travels as float32 and is counted as the bytes that its code would have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Rounding = Callable[[Tensor], Tensor]


class Whole:
    """All numbers of a token, as they are; a codec of the stage rounds them, where it has one."""

    exact = False

    def __init__(self, width: int) -> None:
        self.rank = width

    def side(self, stage: Any, *, encodes: bool) -> nn.Module:
        """See `lc.subspace`'s `Boundary`."""
        return Side(None, None)

    def __repr__(self) -> str:
        return f"Whole({self.rank})"


class TopK(Whole):
    """The `kept` numbers of a token that are largest by size, of activations and of gradients; others are 0."""

    def __init__(self, width: int, kept: int) -> None:
        super().__init__(width)
        self.kept = kept

    @property
    def token_bytes(self) -> float:
        """Each way: float32 numbers, and their places in a byte each."""
        return 5 * self.kept

    def rounded(self, x: Tensor) -> Tensor:
        """Of [..., width]."""
        places = x.abs().topk(self.kept, dim=-1).indices
        return torch.zeros_like(x).scatter_(-1, places, x.gather(-1, places))

    def side(self, stage: Any, *, encodes: bool) -> nn.Module:
        """Rounds activations, and on the receiver's side gradients."""
        return Side(self.rounded, None) if encodes else Side(None, self.rounded)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.rank}, {self.kept})"


class OneBit(TopK):
    """The sign of every number times the mean size of a token's."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)

    @property
    def token_bytes(self) -> float:
        """Each way: a bit a number, and a scale in float32."""
        return self.rank / 8 + 4

    def rounded(self, x: Tensor) -> Tensor:
        """Of [..., width]."""
        size = x.abs().mean(dim=-1, keepdim=True)
        return torch.where(x < 0, -size, size)


class Side(nn.Module):
    """One side of a boundary: rounds what goes forward, or what goes back."""

    def __init__(self, forward: Rounding | None, backward: Rounding | None) -> None:
        super().__init__()
        self.roundings = forward, backward

    def forward(self, x: Tensor, ids: Tensor, start: int = 0) -> Tensor:
        """[batch, time, width] → the same shape."""
        return _Round.apply(x, *self.roundings)


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Rounding | None, backward: Rounding | None) -> Tensor:
        ctx.backward_rounding = backward
        return forward(x) if forward else x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rounding = ctx.backward_rounding
        return rounding(gradient) if rounding else gradient, None, None
