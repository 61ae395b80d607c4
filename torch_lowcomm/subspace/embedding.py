"""The token embedding of a constrained decoder: a fixed part of high rank and a trained part in the subspace."""

import torch
from torch import nn
from torch.nn import functional

from torch_lowcomm.subspace.anchor import Anchor
from torch_lowcomm.subspace.basis import Basis
from torch_lowcomm.subspace.parts import EMBEDDING


class Embedding(nn.Module):
    """TE(t) = T_fixed[t] + T_S[t] (section 4.3.1 of Protocol Models).

    T_fixed, the anchor, is the same on all stages and never trained. T_S is the parameter `weight`, [vocabulary, width], whose
    rows lie in the subspace: `lc.SubspaceAdamW` keeps them there. The row of T_S of the token `padding_idx` is not trained, as
    `nn.Embedding` has it; the token has its fixed part all the same.
    """

    subspace_role = EMBEDDING
    subspace_basis: Basis
    anchor: Anchor

    def __init__(self, vocabulary: int, basis: Basis, anchor: Anchor, *, padding_idx: int | None = None) -> None:
        """Makes an embedding whose T_S is drawn from N(0, sigma²), sigma the anchor's, and projected."""
        super().__init__()
        self.padding_idx = padding_idx
        self.num_embeddings, self.embedding_dim = vocabulary, basis.width
        # Both are the model's own, which has them in its state once, under one name in every stage.
        object.__setattr__(self, "subspace_basis", basis)
        object.__setattr__(self, "anchor", anchor)
        drawn = torch.randn(vocabulary, basis.width, device=basis.vectors.device) * anchor.sigma
        self.weight = nn.Parameter(basis.project(drawn))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [batch, time] to [batch, time, width]."""
        ids = ids.long()
        return functional.embedding(ids, self.weight, self.padding_idx) + self.anchor(ids, self.weight.dtype)

    def extra_repr(self) -> str:
        """Vocabulary and width."""
        return f"{self.num_embeddings}, {self.embedding_dim}"
