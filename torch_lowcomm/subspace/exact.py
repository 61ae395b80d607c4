"""The boundary of a constrained decoder: k coefficients a token, from which the next stage has all of the residual stream."""

from typing import Any, Protocol

from torch import nn

from torch_lowcomm.subspace.boundary import Decode, Encode


class Boundary(Protocol):
    """A kind of boundary, which `cut` makes the two sides of.

    A side is a module: forward(x, ids, start) takes the residual stream [batch, time, width] to coefficients [batch, time, rank],
    or back. ids are its tokens [batch, time]; `start` positions come before the first of them.

    Attributes:
        exact: Whether the stages compute what the uncut model does. The sides then have no parameters of their own.
        rank: Coefficients a token; None: the rank of the decoder's subspace.
    """

    exact: bool
    rank: int | None

    def encoder(self, stage: Any, number: int, embedding: nn.Module) -> nn.Module:
        """The sender's side of the boundary behind block `number`, in a stage that has everything else.

        Args:
            stage: The stage, a `StageModule`.
            number: The block's.
            embedding: The decoder's, on whichever stage it is.
        """
        ...

    def decoder(self, stage: Any, number: int, embedding: nn.Module) -> nn.Module:
        """The receiver's side."""
        ...


class Exact:
    """C = (X − PE − T_fixed[t])·U, and X = C·Uᵀ + PE + T_fixed[t] on the other side (equation 8 of Protocol Models)."""

    exact = True
    rank = None

    def __repr__(self) -> str:
        return "Exact()"

    def encoder(self, stage: Any, number: int, embedding: nn.Module) -> Encode:
        """See `Boundary`."""
        return Encode(stage.subspace_basis, stage.subspace_anchor)

    def decoder(self, stage: Any, number: int, embedding: nn.Module) -> Decode:
        """See `Boundary`."""
        return Decode(stage.subspace_basis, stage.subspace_anchor)
