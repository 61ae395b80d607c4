"""The basis of a subspace, which every stage makes for itself from a seed."""

import contextlib
import functools
import zlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from torch_lowcomm import _C
from torch_lowcomm._option_table import expect_integer

_Call = TypeVar("_Call", bound=Callable[..., Any])


def expect_seed(seed: object) -> None:
    """Raises TypeError or ValueError where a seed is no integer of 64 bits."""
    expect_integer("subspace: seed", seed)
    if not 0 <= seed < 2**64:  # type: ignore[operator]
        raise ValueError(f"subspace: seed: expected 0 or more, below 2^64, got {seed}")


def without_autocast(call: _Call) -> _Call:
    """Makes a function compute in its tensors' own types: autocast would round what keeps a weight in the subspace."""

    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as off:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    off.enter_context(torch.autocast(device, enabled=False))
            return call(*args, **kwargs)

    return cast("_Call", wrapper)


class Basis(nn.Module):
    """U, the orthonormal basis of a subspace S of `rank` dimensions in a residual stream of `width` (section 4.3 of the paper).

    All stages of a pipeline have the same one: it is made from the seed by the library's own Gram-Schmidt in fp64, whose bits are
    the same on every machine. It stays float64 whatever type the model is converted to, and is part of the model's state.

    Attributes:
        vectors: Uᵀ, float64 [rank, width], a buffer: orthonormal rows.
        free_blocks: How many of the decoder's last blocks do not write into S alone, as `constrain` was asked.
    """

    vectors: Tensor

    def __init__(self, width: int, rank: int, *, seed: int = 0) -> None:
        """Makes the basis of `rank` (k) rows from a seed."""
        super().__init__()
        expect_integer("subspace: rank", rank)
        expect_seed(seed)
        self.width, self.rank, self.seed, self.free_blocks = width, rank, seed, 0
        self.register_buffer("vectors", _C.subspace_basis(rank, width, seed))
        self._made_of: tuple[Any, ...] = ()  # the vectors of which the next two were made
        self._rows: dict[torch.dtype, Tensor] = {}
        self._checksum: int | None = None

    def rows(self, dtype: torch.dtype) -> Tensor:
        """Uᵀ for arithmetic on tensors of a type: float64 for float64, else float32; [rank, width]."""
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        self._forget_changed()
        rows = self._rows.get(kind)
        if rows is None:
            with torch.inference_mode(False):  # they may be wanted for training later
                rows = self._rows[kind] = self.vectors.to(kind)
        return rows

    @without_autocast
    def project(self, x: Tensor) -> Tensor:
        """The part of x that lies in S: x·U·Uᵀ, of x's shape [..., width] and type."""
        rows = self.rows(x.dtype)
        return (x.to(rows.dtype) @ rows.t() @ rows).to(x.dtype)

    @without_autocast
    def project_weight(self, weight: Tensor) -> Tensor:
        """U·(Uᵀ·W) of a weight [width, inputs], as torch.nn.Linear stores one whose outputs are to lie in S."""
        rows = self.rows(weight.dtype)
        return (rows.t() @ (rows @ weight.to(rows.dtype))).to(weight.dtype)

    @property
    def checksum(self) -> int:
        """32 bits that tell whether two stages have the same basis: a CRC of the vectors."""
        self._forget_changed()
        if self._checksum is None:
            self._checksum = zlib.crc32(self.vectors.cpu().contiguous().numpy().tobytes())
        return self._checksum

    def _forget_changed(self) -> None:
        """Drops what was made of other vectors, or of these before a checkpoint was loaded into them in place."""
        vectors = self.vectors
        written = 0 if vectors.is_inference() else vectors._version
        made_of = (vectors.device, vectors.data_ptr(), written)
        if self._made_of != made_of:
            self._made_of, self._rows, self._checksum = made_of, {}, None

    def get_extra_state(self) -> Tensor:
        """[free blocks], for the model's state."""
        return torch.tensor([self.free_blocks])

    def set_extra_state(self, state: Any) -> None:
        """Takes nothing of a loaded state: a model compares its free blocks before (`stage.expect_free_blocks`)."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._made_of = ()  # where vectors are assigned, they may have the address of earlier ones

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Moves the basis with its model; a model's conversion to another type leaves it in float64."""
        exact = self.vectors
        super()._apply(fn, recurse)
        if self.vectors.dtype != torch.float64:
            self.vectors = exact.to(self.vectors.device)
        self._made_of = ()
        return self

    def extra_repr(self) -> str:
        """The text in repr()."""
        return f"width={self.width}, rank={self.rank}, seed={self.seed}"
