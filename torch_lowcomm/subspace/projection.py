"""A boundary for decoders whose weights stay free: a projection with anchors."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from torch_lowcomm.subspace.anchor import Anchor
from torch_lowcomm.subspace.basis import Basis

ANCHORS = ("embedding", "own", "signs", "none")


class Projection:
    """A boundary that carries k coordinates of what is left after a token's anchor; not exact: the rest is lost.

    C = (X − A[t])·U and X̂ = C·Uᵀ + A[t], on a decoder whose weights stay free. This is the setting of MAPL (arXiv 2606.05484),
    which learns U on the Stiefel manifold by steepest descent and each stage's anchors; here any optimizer learns them.

    A learned U is two matrices, one a side, that are equal at first and learn apart: no gradient of them crosses the boundary.
    Both stay orthonormal, whatever the optimizer does.
    """

    exact = False

    def __init__(
        self,
        rank: int,
        *,
        seed: int = 0,
        learned: bool = False,
        anchor: str = "embedding",
        sigma: float = 0.1,
    ) -> None:
        """Chooses the boundary; `cut(..., boundary=)` takes it.

        Args:
            rank: k, the numbers that a boundary carries for each token, 1 or more.
            seed: Of U, the same on all ranks.
            learned: Whether U is trained.
            anchor: A. "embedding": a frozen copy of the first stage's embedding, as it was when the decoder was cut, on both
                sides: a table [vocabulary, width] each. "own": a table that the receiver trains, at first the embedding's; what
                of it lies in U is not used, so the sender needs none. "signs": the frozen rows of `Anchor`, without a table.
                "none": 0.
            sigma: Of "signs".
        """
        if rank < 1:
            raise ValueError(f"rank: expected 1 or more, got {rank}")
        if anchor not in ANCHORS:
            raise ValueError(f"anchor: expected one of {', '.join(map(repr, ANCHORS))}, got {anchor!r}")
        self.rank, self.seed, self.learned, self.anchor, self.sigma = rank, seed, learned, anchor, sigma

    def side(self, stage: Any, number: int, embedding: nn.Module, *, encodes: bool) -> nn.Module:
        """See `Boundary`."""
        projection, own = _Orthonormal(self, embedding, learned=self.learned), self.anchor == "own"
        if encodes:
            return _ProjectionEncode(projection, None if own else self._rows(embedding))
        return _ProjectionDecode(projection, self._rows(embedding), subtracted=not own)

    def _rows(self, embedding: Any) -> nn.Module | None:
        """A, as a module that takes ids."""
        vocabulary, width = embedding.weight.shape
        if self.anchor == "none":
            return None
        if self.anchor == "signs":
            return Anchor(vocabulary, width, seed=self.seed, sigma=self.sigma).to(embedding.weight.device)
        return _Table(embedding.weight.detach().to(_arithmetic(embedding.weight)), trained=self.anchor == "own")

    def __repr__(self) -> str:
        sigma = f", sigma={self.sigma}" if self.anchor == "signs" else ""
        return f"Projection(rank={self.rank}, seed={self.seed}, learned={self.learned}, anchor={self.anchor!r}{sigma})"


class _Orthonormal(nn.Module):
    """A matrix [rank, width] of orthonormal rows. A learned one is what Gram-Schmidt makes of a free parameter V.

    The rows are L⁻¹·V with V·Vᵀ = L·Lᵀ (Cholesky): they do not depend on V's size, which weight decay shrinks. torch's own
    parametrization keeps signs in its parameter, and a decay makes zeros of them.
    """

    vectors: torch.Tensor

    def __init__(self, boundary: Any, embedding: Any, *, learned: bool) -> None:
        super().__init__()
        self._learned = learned
        vectors = Basis(embedding.weight.shape[1], boundary.rank, seed=boundary.seed).vectors
        vectors = vectors.to(embedding.weight.device, _arithmetic(embedding.weight))
        if learned:
            self.vectors = nn.Parameter(vectors.clone())
        else:
            self.register_buffer("vectors", vectors.clone())

    @property
    def weight(self) -> torch.Tensor:
        """The rows."""
        if not self._learned:
            return self.vectors
        factor = torch.linalg.cholesky(self.vectors @ self.vectors.t())
        return torch.linalg.solve_triangular(factor, self.vectors, upper=False)


class _Table(nn.Module):
    """Rows of a table, frozen or trained."""

    def __init__(self, rows: torch.Tensor, *, trained: bool) -> None:
        super().__init__()
        if trained:
            self.weight = nn.Parameter(rows.clone())
        else:
            self.register_buffer("weight", rows.clone())

    def forward(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return functional.embedding(ids, self.weight).to(dtype)


class _ProjectionEncode(nn.Module):
    """(X − A[t])·U; X·U where the receiver has an anchor of its own."""

    def __init__(self, projection: nn.Module, anchor: nn.Module | None) -> None:
        super().__init__()
        self.projection, self.anchor = projection, anchor

    def forward(self, x: torch.Tensor, ids: torch.Tensor, start: int = 0) -> torch.Tensor:
        rows = self.projection.weight
        x = x.to(rows.dtype)
        return functional.linear(x if self.anchor is None else x - self.anchor(ids, x.dtype), rows)


class _ProjectionDecode(nn.Module):
    """C·Uᵀ + A[t]; C·Uᵀ + A[t]·(I − U·Uᵀ) where the sender has subtracted nothing."""

    def __init__(self, projection: nn.Module, anchor: nn.Module | None, *, subtracted: bool) -> None:
        super().__init__()
        self.projection, self.anchor, self._subtracted = projection, anchor, subtracted

    def forward(self, c: torch.Tensor, ids: torch.Tensor, start: int = 0) -> torch.Tensor:
        rows = self.projection.weight
        c = c.to(rows.dtype)
        if self.anchor is None:
            return c @ rows
        anchor = self.anchor(ids, c.dtype)
        return (c if self._subtracted else c - functional.linear(anchor, rows)) @ rows + anchor


def _arithmetic(weight: torch.Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)
