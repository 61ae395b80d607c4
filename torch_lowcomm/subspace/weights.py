"""Weights that lie in the subspace S: which parameters they are, and which part of them a rank has."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from torch_lowcomm.diloco.parameters import local
from torch_lowcomm.groups import exact

if TYPE_CHECKING:
    from torch_lowcomm.subspace.basis import Basis

# By role: the dimension of the weight, as its module stores it, along which S acts.
AXES = {"attention_output": 0, "feed_forward_down": 0, "embedding": 1, "bias": 0}


@dataclasses.dataclass(frozen=True)
class ConstrainedWeight:
    """A weight W that lies in S = col(U): W = U·UᵀW (axis 0), or W·U·Uᵀ (axis 1, an embedding). Or a bias: one column."""

    name: str  # of the parameter, in the module that was searched
    parameter: torch.Tensor  # a DTensor where FSDP2 has sharded it
    role: str  # "attention_output" (W_p1), "feed_forward_down" (W_p2), "embedding" (T_S), or "bias" (of W_p1 or W_p2)
    basis: Basis
    is_coordinates: bool = False  # it is not W but its coordinates Z, of W = U·Z or Z·Uᵀ (`lc.subspace.reparam`)

    @property
    def axis(self) -> int:
        """The dimension along which S acts."""
        return AXES[self.role]

    @property
    def vectors(self) -> torch.Tensor:
        """The columns of Uᵀ [k, d] that belong to this rank's part of the weight."""
        vectors = self.basis.vectors
        if self.slices is None:
            return vectors
        mesh, placements = self.parameter.device_mesh, self.parameter.placements
        shape, offset = compute_local_shape_and_global_offset(self.parameter.shape, mesh, placements)
        return vectors[:, offset[self.axis] : offset[self.axis] + shape[self.axis]]

    @property
    def slices(self) -> dist.ProcessGroup | None:
        """The ranks whose parts are slices along the axis, so that U acts on all of them together; None: U acts on each."""
        groups = [group for dimension, group in shards(self.parameter) if dimension == self.axis]
        return groups[0] if groups else None

    @property
    def others(self) -> tuple[dist.ProcessGroup, ...]:
        """The ranks that share out the weight's other dimension."""
        return tuple(group for dimension, group in shards(self.parameter) if dimension != self.axis)

    def coordinates(self, matrix: torch.Tensor) -> torch.Tensor:
        """Of this rank's part of a matrix like W: UᵀX [k, n] or X·U [n, k]; of slices a summand of it."""
        u = self.vectors.to(matrix)
        return u @ matrix if self.axis == 0 else matrix @ u.T

    def expand(self, coordinates: torch.Tensor) -> torch.Tensor:
        """This rank's part of U·C or C·Uᵀ."""
        u = self.vectors.to(coordinates)
        return u.T @ coordinates if self.axis == 0 else coordinates @ u


def constrained_weights(module: nn.Module) -> list[ConstrainedWeight]:
    """Finds the weights that `lc.subspace.constrain` has put into S in a model or a stage, by the attributes that it left on
    their modules; a weight that does not fit its basis is a ValueError.
    """
    found = []
    for path, part in module.named_modules():
        role, basis = getattr(part, "subspace_role", None), getattr(part, "subspace_basis", None)
        if role is None or basis is None:
            continue
        if role not in AXES:
            raise ValueError(f"{path}: subspace_role: expected one of {', '.join(AXES)}, got {role!r}")
        for kind, of in (("weight", role), ("coordinates", role), ("bias", "bias")):
            if (parameter := part._parameters.get(kind)) is not None:
                name = f"{path}.{kind}" if path else kind
                found.append(ConstrainedWeight(name, parameter, of, basis, kind == "coordinates"))
                _expect_shape(found[-1])
    return found


def _expect_shape(weight: ConstrainedWeight) -> None:
    basis, parameter = weight.basis, weight.parameter
    shape, size = (basis.rank, basis.width), basis.rank if weight.is_coordinates else basis.width
    dimensions = 1 if weight.role == "bias" else 2
    if parameter.ndim != dimensions or parameter.shape[weight.axis] != size or tuple(basis.vectors.shape) != shape:
        raise ValueError(
            f"{weight.name}: expected {dimensions} dimensions with {size} elements in dimension {weight.axis}, and vectors of "
            f"shape {shape}, got shape {tuple(parameter.shape)} and vectors of shape {tuple(basis.vectors.shape)}"
        )
    if weight.is_coordinates and weight.slices is not None:
        raise ValueError(
            f"{weight.name}: expected coordinates that are not sharded in dimension {weight.axis}, got {parameter.placements}: "
            f"shard the other one (fully_shard's shard_placement_fn)"
        )


def one_basis(weights: Sequence[ConstrainedWeight]) -> Basis | None:
    """The basis of all these weights, or one of several that are equal; None of no weights."""

    def described(weight: ConstrainedWeight) -> str:
        basis = weight.basis
        return f"width {basis.width}, rank {basis.rank}, seed {basis.seed}, checksum {basis.checksum:#010x}"

    for weight in weights:
        if described(weight) != described(weights[0]):
            raise ValueError(
                f"expected one basis for all weights, got {described(weights[0])} for {weights[0].name} and {described(weight)} "
                f"for {weight.name}"
            )
    return weights[0].basis if weights else None


def shards(parameter: torch.Tensor) -> list[tuple[int, dist.ProcessGroup]]:
    """The dimensions of a DTensor that are sharded, each with the ranks that share it out; none of other tensors."""
    if not isinstance(parameter, DTensor):
        return []
    found: dict[int, dist.ProcessGroup] = {}
    for number, placement in enumerate(parameter.placements):
        if type(placement) is Replicate:
            continue
        if type(placement) is not Shard or placement.dim in found:
            raise ValueError(
                f"expected a parameter whose dimensions are sharded once or not at all, got placements {parameter.placements}"
            )
        found[placement.dim] = parameter.device_mesh.get_group(number)
    return list(found.items())


def sum_slices(weights: Iterable[ConstrainedWeight | None], coordinates: Iterable[torch.Tensor | None]) -> None:
    """Sums a tensor of each weight over the ranks that have its slices, in place; None: there is nothing to sum."""
    pairs = zip(weights, coordinates, strict=True)
    sum_tensors((c, weight.slices) for weight, c in pairs if weight is not None and c is not None)


def sum_tensors(summands: Iterable[tuple[torch.Tensor, dist.ProcessGroup | None]]) -> None:
    """Sums tensors over their groups, in place and exactly; one all_reduce a group and dtype. None: there is nothing to sum."""
    calls: dict[tuple[str, torch.dtype], tuple[dist.ProcessGroup, list[torch.Tensor]]] = {}
    for tensor, group in summands:
        if group is not None:
            calls.setdefault((group.group_name, tensor.dtype), (group, []))[1].append(tensor)
    for group, tensors in calls.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        with exact():
            dist.all_reduce(flat, group=group)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


def sum_numbers(
    summands: Sequence[tuple[float, tuple[dist.ProcessGroup, ...]]],
    stages: dist.ProcessGroup | None,
    device: torch.device,
) -> float:
    """The sum of all ranks' numbers, equal on all, which does not depend on how they are spread over ranks.

    A rank's sum travels as two float64 numbers, on `device`, the rounded sum and what rounding took from it, so that any split
    of the summands gives the same bits. Each of these, the same on all ranks, has the groups over which it has to be summed,
    outermost last; the sums of the ranks of `stages`, if any, are then added.
    """
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[float]] = {}
    for number, groups in summands:
        by_groups.setdefault(groups, []).append(number)
    own: list[float] = []
    for groups, numbers in by_groups.items():
        pairs = numbers
        for group in groups:
            pairs = _gathered(pairs, group, device)
        own += pairs
    return _pair(_gathered(own, stages, device) if stages is not None else own)[0]


def distances(weights: Sequence[ConstrainedWeight]) -> dict[str, float]:
    """By name: ‖W − U·UᵀW‖ / ‖W‖, how far each weight is outside S; 0 of a weight of zeros, nothing of coordinates.
    Collective where weights are sharded.
    """
    weights = [weight for weight in weights if not weight.is_coordinates]
    parts = [wide(local(weight.parameter)) for weight in weights]
    coordinates = [weight.coordinates(part) for weight, part in zip(weights, parts, strict=True)]
    sum_slices(weights, coordinates)
    found = {}
    for weight, part, c in zip(weights, parts, coordinates, strict=True):
        outside = part - weight.expand(c)
        squares = torch.stack([outside.double().square().sum(), part.double().square().sum()])
        for _, group in shards(weight.parameter):
            sum_tensors([(squares, group)])
        off, whole = squares.tolist()
        found[weight.name] = math.sqrt(off / whole) if whole > 0 else off
    return found


def expect_in_subspace(weights: Sequence[ConstrainedWeight], found: dict[str, float]) -> None:
    """Raises ValueError naming a weight whose distance from S is more than rounding: 1e-3, or what its dtype cannot hold."""
    for weight in weights:
        allowed = max(1e-3, 4 * torch.finfo(weight.parameter.dtype).eps)
        if not found.get(weight.name, 0.0) <= allowed:  # coordinates cannot leave S
            raise ValueError(
                f"SubspaceAdamW: {weight.name}: expected a weight in the subspace, whose part outside is at most {allowed:.1e} "
                f"of its norm, got {found[weight.name]:.3e}: constrain the model first, and change such a weight by this "
                f"optimizer only"
            )


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the dtype of the arithmetic: float64 or float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _pair(numbers: Sequence[float]) -> tuple[float, float]:
    """The rounded sum, and what is left of the sum."""
    if not all(map(math.isfinite, numbers)):
        return sum(numbers), 0.0
    try:
        rounded = math.fsum(numbers)
    except OverflowError:
        return math.inf, 0.0
    return rounded, math.fsum([*numbers, -rounded])


def _gathered(numbers: Sequence[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    mine = torch.tensor(_pair(numbers), dtype=torch.float64, device=device)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with exact():
        dist.all_gather(everyones, mine, group=group)
    return torch.cat(everyones).tolist()
