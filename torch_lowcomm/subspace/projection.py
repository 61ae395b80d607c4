"""A boundary for decoders whose weights stay free: a projection with anchors."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from torch_lowcomm.subspace.basis import Basis


class Projection:
    """A boundary that carries k coordinates of what is left after a token's anchor; not exact: the rest is lost.

    C = (X − A[t])·U and X̂ = C·Uᵀ + A[t], on a decoder whose weights stay free, after MAPL (arXiv 2606.05484), which learns U and
    each stage's anchors. Here both stay: A is a frozen copy of the first stage's embedding, as it was when the decoder was cut,
    on both sides, a table [vocabulary, width] each.
    """

    exact = False

    def __init__(self, rank: int, *, seed: int = 0) -> None:
        """Chooses the boundary; `cut(..., boundary=)` takes it.

        Args:
            rank: k, the numbers that a boundary carries for each token, 1 or more.
            seed: Of U, the same on all ranks.
        """
        if rank < 1:
            raise ValueError(f"rank: expected 1 or more, got {rank}")
        self.rank, self.seed = rank, seed

    def side(self, stage: Any, number: int, embedding: nn.Module, *, encodes: bool) -> nn.Module:
        """See `Boundary`."""
        anchors = embedding.weight.detach()
        vectors = Basis(anchors.shape[1], self.rank, seed=self.seed).vectors
        kind = torch.promote_types(anchors.dtype, torch.float32)
        return _Side(vectors.to(anchors.device, kind), anchors.to(kind, copy=True), encodes=encodes)

    def __repr__(self) -> str:
        return f"Projection(rank={self.rank}, seed={self.seed})"


class _Side(nn.Module):
    """(X − A[t])·U, or C·Uᵀ + A[t]; `vectors` is Uᵀ [rank, width]."""

    def __init__(self, vectors: torch.Tensor, anchors: torch.Tensor, *, encodes: bool) -> None:
        super().__init__()
        self.register_buffer("vectors", vectors)
        self.register_buffer("anchors", anchors)
        self._encodes = encodes

    def forward(self, x: torch.Tensor, ids: torch.Tensor, start: int = 0) -> torch.Tensor:
        anchors = functional.embedding(ids, self.anchors)
        x = x.to(self.vectors.dtype)
        return functional.linear(x - anchors, self.vectors) if self._encodes else x @ self.vectors + anchors
