"""Lists the tensors that an outer loop averages: their names, and where a shard lies in its parameter."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from torch_lowcomm._log import logger
from torch_lowcomm.diloco.inner_optimizer import OptimizerAround
from torch_lowcomm.diloco.options import DiLoCoXOptions

Held = tuple[str, torch.Tensor, Sequence[int], Sequence[int]]  # as `_C.DiLoCoX` takes it


@dataclasses.dataclass(frozen=True)
class LoopInputs:
    """The options, and the tensors that are averaged: parameters, and buffers if they are asked for."""

    options: DiLoCoXOptions
    for_core: dict[str, Any]
    parameters: list[Held]
    buffers: list[Held]

    @staticmethod
    def checked(
        optimizer: torch.optim.Optimizer, model: nn.Module | None, options: Mapping[str, Any], site: Sequence[int]
    ) -> LoopInputs:
        """Checks the arguments of `DiLoCoX` on this rank, before all ranks compare them; raises as that says."""
        given = DiLoCoXOptions.named(**options)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"DiLoCoX: expected an optimizer, got {type(optimizer).__name__}")
        if isinstance(optimizer, OptimizerAround):
            raise TypeError("DiLoCoX: expected an inner optimizer, got a DiLoCoX: one outer loop a model")
        if given.average_buffers and model is None:
            raise ValueError("DiLoCoX: average_buffers: expected model= too, got none")
        buffers = model.named_buffers() if given.average_buffers and model is not None else ()
        # For example running means.
        averaged = [(name, buffer) for name, buffer in buffers if buffer.is_floating_point()]
        parameters = held(_named_parameters(optimizer, model), site)
        return LoopInputs(given, given.for_core(), parameters, held(averaged, site))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a tensor: its shard of a DTensor (FSDP2, HSDP), else the tensor. It shares memory."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def _named_parameters(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> list[tuple[str, torch.Tensor]]:
    """Returns (name, parameter) of the parameters that an optimizer trains, in its order; "0", "1", ... without a model."""
    names = {} if model is None else {id(p): name for name, p in model.named_parameters()}
    found = []
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        name = names.get(id(parameter), str(number) if model is None else None)
        if name is None:
            raise ValueError(
                f"DiLoCoX: expected an optimizer of the model's parameters, got one of another, of shape "
                f"{tuple(parameter.shape)}: pass the model that the optimizer was made of"
            )
        found.append((name, parameter))
    given = {id(parameter) for _, parameter in found}
    named = () if model is None else model.named_parameters()
    left = [name for name, parameter in named if parameter.requires_grad and id(parameter) not in given]
    if left:
        logger.warning(
            "DiLoCoX: expected an optimizer of all parameters of the model that require gradients, got one without %s%s: they "
            "are neither trained nor averaged, and may differ between ranks. requires_grad_(False) says that it is so meant",
            ", ".join(left[:3]),
            f" and {len(left) - 3} others" if len(left) > 3 else "",
        )
    return found


def sharing_ranks(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Returns the global ranks that hold DTensors together with this rank; empty without a DTensor."""
    meshes = [tensor.device_mesh.mesh for tensor in tensors if isinstance(tensor, DTensor)]
    return {int(rank) for mesh in meshes for rank in mesh.flatten()}


def held(named: Iterable[tuple[str, torch.Tensor]], site: Sequence[int]) -> list[Held]:
    """Returns what this rank holds of parameters: (name, its own tensor, the whole shape, the tensor's place in it), the last
    two empty where that is the whole, or the site is this rank alone. A part that is no box of its parameter is a ValueError.
    """
    found: list[Held] = []
    for name, tensor in named:
        own = local(tensor)
        if not isinstance(tensor, DTensor) or len(site) == 1:
            found.append((name, own, (), ()))
        else:
            found.append((name, own, tuple(tensor.shape), _offset(name, tensor)))
    return found


def _offset(name: str, tensor: DTensor) -> tuple[int, ...]:
    """Returns where this rank's part of a DTensor begins, which must be a box: one range of each dimension."""
    indices = [torch.arange(size) for size in tensor.shape]  # of each dimension: those that this rank holds
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    known = True
    for placement, place, parts in zip(tensor.placements, coordinate, tensor.device_mesh.shape, strict=True):
        if isinstance(placement, _StridedShard):  # FSDP2's of what is sharded already, as by tensor parallelism
            dimension, pieces = placement.dim, int(placement.split_factor)
        elif isinstance(placement, Shard):
            dimension, pieces = placement.dim, 1
        else:
            known = known and isinstance(placement, Replicate)
            continue
        dealt = indices[dimension].chunk(parts * pieces)[place::parts]
        indices[dimension] = torch.cat(dealt) if dealt else indices[dimension][:0]
    begins = tuple(int(kept[0]) if len(kept) else 0 for kept in indices)
    ranges = all(
        torch.equal(kept, torch.arange(len(kept)) + begin) for kept, begin in zip(indices, begins, strict=True)
    )
    found = local(tensor).shape
    if not known or not ranges or found != tuple(map(len, indices)):
        raise ValueError(
            f"DiLoCoX: {name}: expected every rank to hold one range of each dimension of a parameter, as torch divides it, got "
            f"{tensor.placements} of shape {tuple(tensor.shape)} over a mesh of {tensor.device_mesh.shape}, with "
            f"{tuple(found)} of it here"
        )
    return begins
