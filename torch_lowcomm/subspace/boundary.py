"""The two sides of a boundary that carries coordinates in a subspace, as modules with gradients."""

from typing import Any

import torch
from torch import Tensor, nn

from torch_lowcomm import _C
from torch_lowcomm.subspace.anchor import Anchor
from torch_lowcomm.subspace.basis import Basis, without_autocast
from torch_lowcomm.subspace.grassmann import GradientSum


class Encode(nn.Module):
    """Activations to coefficients, in the stage before a boundary (Eq. 8 of the paper): C = (X − PE − T_fixed[ids])·U.

    The gradient continues as G·Uᵀ (Eq. 10). Arithmetic is float32, and float64 in models of float64, whatever type X has.
    """

    def __init__(self, basis: Basis, anchor: Anchor, *, coefficients: torch.dtype | None = None) -> None:
        """Makes the side before a boundary.

        Args:
            basis: The subspace's.
            anchor: What is taken out of X.
            coefficients: The type that travels, torch.bfloat16 say, which is not exact. None: the arithmetic's.
        """
        super().__init__()
        self.basis, self.anchor, self.coefficients = basis, anchor, coefficients

    def forward(self, x: Tensor, ids: Tensor, start: int = 0) -> Tensor:
        """Encodes [..., time, width], of any float type, to [..., time, rank].

        Args:
            x: The activations.
            ids: int64 [..., time], the tokens of x.
            start: The place in its sequence of the first token.

        Raises:
            ValueError: Shapes do not fit each other, or an id is outside the vocabulary.
        """
        c = _Encode.apply(x, ids, self.basis.rows(x.dtype), self.anchor, start)
        return c if self.coefficients is None else c.to(self.coefficients)


class Decode(nn.Module):
    """Coefficients to activations, in the stage behind a boundary: X = C·Uᵀ + PE + T_fixed[ids].

    The gradient that goes back is G·U (Eq. 9 of the paper).
    """

    def __init__(self, basis: Basis, anchor: Anchor, *, dtype: torch.dtype | None = None) -> None:
        """Makes the side behind a boundary.

        Args:
            basis: The subspace's.
            anchor: What is added again.
            dtype: Of the activations; None: the arithmetic's.
        """
        super().__init__()
        self.basis, self.anchor, self.dtype = basis, anchor, dtype
        self.gradients: GradientSum | None = None  # sees the gradients before they are projected

    def forward(self, c: Tensor, ids: Tensor, start: int = 0) -> Tensor:
        """Decodes [..., time, rank], of any float type, to [..., time, width]; `ids`, `start` and errors as for `Encode`."""
        rows = self.basis.rows(c.dtype)
        x: Tensor = _Decode.apply(c, ids, rows, self.anchor, start, self.dtype or rows.dtype)
        if self.gradients is not None and self.gradients.counts and x.requires_grad:
            x.register_hook(self.gradients.add)
        return x


def _options(anchor: Anchor, ids: Tensor, rows: Tensor, start: int) -> dict[str, Any]:
    return {
        "seed": anchor.seed,
        "scale": anchor.sigma,
        "normal": anchor.fixed == "gaussian",
        "positions": anchor.places(ids, rows.dtype, start),
        "vocabulary": anchor.vocabulary,
    }


def _product(x: Tensor, matrix: Tensor) -> Tensor:
    """The product of the last dimension of x and a matrix."""
    if torch.is_grad_enabled() and x.requires_grad:  # the gradient of a gradient
        return x @ matrix
    return _C.product(x.reshape(-1, x.shape[-1]), matrix).view(*x.shape[:-1], -1)


class _Encode(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, ids: Tensor, rows: Tensor, anchor: Anchor, start: int) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.dtype = x.dtype
        return _C.subspace_encode(x, ids, rows, **_options(anchor, ids, rows, start))

    @staticmethod
    @without_autocast
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        return _product(gradient.to(rows.dtype), rows).to(ctx.dtype), None, None, None, None


class _Decode(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, c: Tensor, ids: Tensor, rows: Tensor, anchor: Anchor, start: int, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.dtype = c.dtype
        return _C.subspace_decode(c, ids, rows, **_options(anchor, ids, rows, start), dtype=dtype)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        return _product(gradient.to(rows.dtype), rows.t()).to(ctx.dtype), None, None, None, None, None
