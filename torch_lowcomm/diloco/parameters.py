"""Lists the tensors that an outer loop averages: their names, and where a shard lies in its parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Held = tuple[str, torch.Tensor, Sequence[int], Sequence[int]]  # as `_C.DiLoCoX` takes it


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a tensor: its shard of a DTensor (FSDP2, HSDP), else the tensor. It shares memory."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def named_parameters(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> list[tuple[str, torch.Tensor]]:
    """Returns (name, parameter) of the parameters that an optimizer trains, in the optimizer's order.

    Args:
        optimizer: Its parameter groups list the parameters.
        model: Gives the names; None for "0", "1", ... in the optimizer's order.

    Raises:
        ValueError: A parameter does not belong to the model.
    """
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
    return found


def named_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Returns (name, buffer) of a model's floating-point buffers, for example running means."""
    return [(name, buffer) for name, buffer in model.named_buffers() if buffer.is_floating_point()]


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """Returns the global ranks of a mesh."""
    return [int(rank) for rank in mesh.mesh.flatten()]


def sharing_ranks(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Returns the global ranks that hold DTensors together with this rank; empty without a DTensor."""
    return {rank for tensor in tensors if isinstance(tensor, DTensor) for rank in ranks_of(tensor.device_mesh)}


def held(named: Iterable[tuple[str, torch.Tensor]], site: Sequence[int]) -> list[Held]:
    """Returns what this rank holds of parameters: (name, its own tensor, the whole shape, the tensor's place in it).

    Shape and place are empty where the tensor is the whole parameter. So they are for a shard that no other rank of the site
    shares, and for one that is not a box of its parameter, as where FSDP2 shards what is sharded already. Such a shard is
    averaged as a parameter of this rank alone, under a name with the rank's place in the site.

    Args:
        named: (name, parameter).
        site: Global ranks of the site, this one's among them.
    """
    found: list[Held] = []
    for name, tensor in named:
        own = local(tensor)
        if not isinstance(tensor, DTensor):
            found.append((name, own, (), ()))
        elif not _is_box(tensor) or not set(ranks_of(tensor.device_mesh)) <= set(site):
            place = f"@{list(site).index(dist.get_rank())}" if len(site) > 1 else ""
            found.append((name + place, own, (), ()))
        else:
            _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            found.append((name, own, tuple(tensor.shape), tuple(offset)))
    return found


def _is_box(tensor: DTensor) -> bool:
    """Whether each rank holds a box of the tensor: each dimension is sharded once at most."""
    sharded = [placement.dim for placement in tensor.placements if type(placement) is Shard]
    known = all(type(placement) in (Shard, Replicate) for placement in tensor.placements)
    return known and len(sharded) == len(set(sharded))
