"""The subspace without its own optimizer: coordinates as parameters."""

import functools

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from torch_lowcomm.subspace.basis import Basis, without_autocast
from torch_lowcomm.subspace.weights import AXES, constrained_weights, wide


class _Coordinates(nn.Module):
    """What a module becomes whose weight W has given way to `coordinates`, the parameter Z: W = U·Z or Z·Uᵀ."""

    subspace_basis: Basis
    subspace_role: str

    def __reduce__(self) -> tuple[object, ...]:
        """Its class has no name by which pickle could find it."""
        return _blank, type(self).__bases__, self.__getstate__()

    @property
    def weight(self) -> torch.Tensor:
        """W, made of the coordinates where somebody asks; no forward pass does."""
        vectors = self._vectors()
        return vectors.T @ self.coordinates if AXES[self.subspace_role] == 0 else self.coordinates @ vectors

    def _vectors(self) -> torch.Tensor:
        """Uᵀ, [k, d], in the coordinates' dtype."""
        return self.subspace_basis.rows(self.coordinates.dtype).to(self.coordinates.dtype)


class _LinearOfCoordinates(_Coordinates):
    """y = U·(Z·x) + bias: k/d of the operations of W·x twice, in place of one product with W."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        vectors = self._vectors()
        return functional.linear(functional.linear(x, self.coordinates), vectors.T, self.bias)


class _EmbeddingOfCoordinates(_Coordinates):
    """T_S[t] = Z[t]·Uᵀ, in addition to the fixed part where there is one."""

    @without_autocast  # as of a table of rows
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        vectors = self._vectors()
        trained = functional.embedding(ids, self.coordinates, getattr(self, "padding_idx", None)) @ vectors
        anchor = getattr(self, "anchor", None)
        return trained if anchor is None else trained + anchor(ids, trained.dtype)


@functools.cache
def _class_of(kind: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    """A module's class still, with a forward pass and a `weight` of its own."""
    return type(f"{base.__name__}OfCoordinates", (kind, base), {})


def _blank(kind: type[nn.Module], base: type[nn.Module]) -> nn.Module:
    """A module for a pickled state."""
    made = _class_of(kind, base)
    return made.__new__(made)


@without_autocast
def reparam(module: nn.Module) -> nn.Module:
    """Puts coordinates in the place of constrained weights, W = U·Z, in a module, and returns it: Z is what an optimizer trains.

        model = lc.subspace.reparam(lc.subspace.constrain(decoder, rank=64))
        optimizer = lc.SubspaceAdamW(model)             # or any other: SGD, AdamW, Muon

    Weights, their gradients and what FSDP2 gathers of them take k/d of the memory. Nothing is projected, for coordinates cannot
    leave S. They are parameters "<module>.coordinates", [k, inputs] of a linear module and [vocabulary, k] of an embedding;
    "<module>.weight" still gives W.

    With SGD the weights move as constrained ones with projected gradients do, to rounding; with `lc.SubspaceAdamW` as constrained
    ones with `lc.SubspaceAdamW`. Elementwise methods differ from those of weights: their second moments are of coordinates, which
    depend on the choice of U within S. A bias of W_p1 or W_p2 stays a vector in S.

    FSDP2 may shard the dimension of a linear module's coordinates that is not k, by `fully_shard(shard_placement_fn=…)`.

    Args:
        module: A constrained model, or a stage of one; before `fully_shard`. A stage of free blocks alone stays as it is; one
            in which nothing is constrained, or that is sharded already, is a ValueError.
    """
    found = constrained_weights(module)
    weights = [weight for weight in found if not weight.is_coordinates and weight.role != "bias"]
    if not weights and (found or not isinstance(getattr(module, "subspace_basis", None), Basis)):
        raise ValueError("reparam: expected a module with constrained weights (lc.subspace.constrain), got none in it")
    for weight in weights:
        if isinstance(weight.parameter, DTensor):
            raise ValueError(f"reparam: {weight.name}: expected a weight that is not sharded yet, got a DTensor")
    for weight in weights:
        part = module.get_submodule(weight.name.rpartition(".")[0])
        whole = part._parameters.pop("weight").detach()
        requires_grad = weight.parameter.requires_grad
        coordinates = weight.coordinates(wide(whole)).to(whole.dtype)
        part.register_parameter("coordinates", nn.Parameter(coordinates, requires_grad))
        kind = _EmbeddingOfCoordinates if weight.role == "embedding" else _LinearOfCoordinates
        part.__class__ = _class_of(kind, type(part))
    return module
