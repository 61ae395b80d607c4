"""Kinds of boundary, and the two sides of the exact one, which carries coordinates in a subspace, as modules with gradients."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torch_lowcomm import _C
from torch_lowcomm.subspace.anchor import Anchor
from torch_lowcomm.subspace.basis import Basis, without_autocast


class Encode(nn.Module):
    """Activations to coefficients, in the stage before a boundary (Eq. 8 of the paper): C = (X − PE − T_fixed[ids])·U.

    The gradient continues as G·Uᵀ (Eq. 10). Arithmetic is float32, and float64 in models of float64, whatever type X has.
    """

    def __init__(self, basis: Basis, anchor: Anchor) -> None:
        """Makes the side before a boundary, which takes `anchor` out of X."""
        super().__init__()
        self.basis, self.anchor = basis, anchor

    def forward(self, x: Tensor, ids: Tensor, start: int = 0) -> Tensor:
        """Encodes [..., time, width], of any float type, to [..., time, rank] of the arithmetic's.

        ids, int64 [..., time], are the tokens of x, whose first is at `start` in its sequence; others, or one outside the
        vocabulary, are a ValueError.
        """
        return _Cross.apply(x, ids, self.basis.rows(x.dtype), self.anchor, start, True)


class Decode(nn.Module):
    """Coefficients to activations, in the stage behind a boundary: X = C·Uᵀ + PE + T_fixed[ids].

    The gradient that goes back is G·U (Eq. 9 of the paper).
    """

    def __init__(self, basis: Basis, anchor: Anchor) -> None:
        """Makes the side behind a boundary, which adds `anchor` again."""
        super().__init__()
        self.basis, self.anchor = basis, anchor

    def forward(self, c: Tensor, ids: Tensor, start: int = 0) -> Tensor:
        """Decodes [..., time, rank], of any float type, to [..., time, width]; `ids`, `start` and errors as for `Encode`."""
        return _Cross.apply(c, ids, self.basis.rows(c.dtype), self.anchor, start, False)


class Boundary(Protocol):
    """A kind of boundary, which `cut` makes the two sides of. Stages compare its repr.

    A side is a module without parameters: forward(x, ids, start) takes the residual stream [batch, time, width] to coefficients
    [batch, time, rank], or back. ids are its tokens [batch, time]; `start` positions come before the first of them.

    Attributes:
        exact: Whether the stages compute what the uncut model does.
        rank: Coefficients a token; None: the rank of the decoder's subspace.
    """

    exact: bool
    rank: int | None

    def side(self, stage: Any, *, encodes: bool) -> nn.Module:
        """The sender's or the receiver's side of a boundary, in a `StageModule` that has everything else."""
        ...


class Exact:
    """C = (X − PE − T_fixed[t])·U, and X = C·Uᵀ + PE + T_fixed[t] on the other side (equation 8 of Protocol Models)."""

    exact = True
    rank = None

    def __repr__(self) -> str:
        return "Exact()"

    def side(self, stage: Any, *, encodes: bool) -> Encode | Decode:
        """See `Boundary`."""
        return (Encode if encodes else Decode)(stage.subspace_basis, stage.subspace_anchor)


def _product(x: Tensor, matrix: Tensor) -> Tensor:
    """The product of the last dimension of x and a matrix."""
    if torch.is_grad_enabled() and x.requires_grad:  # the gradient of a gradient
        return x @ matrix
    return _C.product(x.reshape(-1, x.shape[-1]), matrix).view(*x.shape[:-1], -1)


class _Cross(torch.autograd.Function):
    """What `Encode` or `Decode` computes."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, ids: Tensor, rows: Tensor, anchor: Anchor, start: int, encodes: bool) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.dtype, ctx.encodes = x.dtype, encodes
        options = anchor.options(ids, rows.dtype, start)
        if encodes:
            return _C.subspace_encode(x, ids, rows, **options)
        return _C.subspace_decode(x, ids, rows, **options, dtype=rows.dtype)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        product = _product(gradient.to(rows.dtype), rows if ctx.encodes else rows.t())
        return product.to(ctx.dtype), None, None, None, None, None
