"""The frozen part of a token's activation, which every stage makes for itself, and the embedding that adds a trained one."""

import zlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_lowcomm import _C
from torch_lowcomm.subspace.basis import Basis, expect_seed
from torch_lowcomm.subspace.parts import EMBEDDING

_MOST_TOKENS = 2**31


class Anchor(nn.Module):
    """T_fixed, the frozen part of a token embedding (section 4.3.1 of the paper), and positions that are added to it.

    A token's row is made of (seed, token, dimension) by the counter-based generator, on every machine with the same bits: there
    is no table, and nothing grows with the vocabulary. Signs of one size serve as well as the paper's Gaussian numbers.

    Attributes:
        positions: float [context, width], a buffer that has the memory of what it was given, not trained and not saved. None:
            nothing is added for a position, as with rotary embeddings, which do not enter the residual stream.
    """

    positions: Tensor | None

    def __init__(
        self,
        vocabulary: int,
        width: int,
        *,
        seed: int = 0,
        sigma: float = 0.1,
        fixed: str = "signs",
        positions: Tensor | None = None,
    ) -> None:
        """Makes an anchor of rows [width] with the standard deviation `sigma`; all stages are given the same options.

        The elements are ±sigma with `fixed` "signs"; with "gaussian" they are of N(0, sigma²), as in the paper. `positions`,
        float [context, width], is added to the row by a token's place in its sequence: a frozen table.
        """
        super().__init__()
        if not 0 < vocabulary <= _MOST_TOKENS:
            raise ValueError(f"subspace: vocabulary: expected 1...{_MOST_TOKENS}, got {vocabulary}")
        expect_seed(seed)
        if not 0 <= sigma < float("inf"):
            raise ValueError(f"subspace: sigma: expected a finite number of 0 or more, got {sigma}")
        if fixed not in ("signs", "gaussian"):
            raise ValueError(f"subspace: fixed: expected 'signs' or 'gaussian', got {fixed!r}")
        if positions is not None and (positions.dim() != 2 or positions.shape[1] != width):
            raise ValueError(f"subspace: positions: expected [context, {width}], got shape {tuple(positions.shape)}")
        self.vocabulary, self.width, self.seed, self.sigma, self.fixed = vocabulary, width, seed, sigma, fixed
        self.register_buffer("positions", None if positions is None else positions.detach(), persistent=False)
        self._checksum: tuple[object, int] | None = None

    def forward(self, ids: Tensor, dtype: torch.dtype = torch.float32, start: int = 0) -> Tensor:
        """Positions + T_fixed[ids] for ids [..., time] whose first is at `start`: [..., time, width] of `dtype`, without a
        gradient. Arithmetic is float64 for float64, else float32. An id outside the vocabulary is a ValueError (checked on
        the host).
        """
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        return _C.subspace_anchor(ids, self.width, **self.options(ids, kind, start), dtype=kind).to(dtype)

    def options(self, ids: Tensor, dtype: torch.dtype, start: int) -> dict[str, Any]:
        """What the kernels make rows of: positions are those of ids [..., time] whose first is at `start`, [time, width]."""
        places = self.positions
        if places is not None:
            end = start + ids.shape[-1]
            if end > len(places):
                raise ValueError(f"subspace: ids: expected at most {len(places)} places, got {end}")
            places = places[start:end].to(dtype).contiguous()
        return {
            "seed": self.seed,
            "scale": self.sigma,
            "normal": self.fixed == "gaussian",
            "positions": places,
            "vocabulary": self.vocabulary,
        }

    @property
    def checksum(self) -> int:
        """32 bits that tell whether two stages have the same anchor: a CRC of all that its rows are made of."""
        key = None if self.positions is None else (self.positions.data_ptr(), self.positions._version)
        if self._checksum is None or self._checksum[0] != key:
            crc = zlib.crc32(self.extra_repr().encode())
            if self.positions is not None:
                crc = zlib.crc32(self.positions.cpu().double().contiguous().numpy().tobytes(), crc)
            self._checksum = key, crc
        return self._checksum[1]

    def get_extra_state(self) -> Tensor:
        """The numbers that the rows are made of, for the model's state: float64 [seed, sigma, whether Gaussian]."""
        return torch.tensor([self.seed, self.sigma, self.fixed == "gaussian"], dtype=torch.float64)

    def set_extra_state(self, state: Any) -> None:
        """Refuses a loaded state whose rows are made of another seed, sigma or kind."""
        mine = self.get_extra_state()
        if not torch.equal(state.cpu(), mine):
            raise ValueError(
                f"subspace: anchor: expected a state of [seed, sigma, gaussian] = {mine.tolist()}, got {state.tolist()}"
            )

    def extra_repr(self) -> str:
        """The text in repr()."""
        return f"vocabulary={self.vocabulary}, width={self.width}, seed={self.seed}, sigma={self.sigma}, fixed={self.fixed!r}"


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
