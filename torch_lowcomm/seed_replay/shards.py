"""The shards that the ranks of a machine have of its weights (FSDP2)."""

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from torch_lowcomm._reshard import reshard
from torch_lowcomm.diloco.parameters import local
from torch_lowcomm.groups import exact

# A row of the core's list: name, tensor, whether it decays, its first element's place in the whole tensor.
Entry = tuple[str, torch.Tensor, bool, int]


def entries(model: nn.Module) -> list[Entry]:
    """Returns the parameters that require gradients, in the order of the model's names; of a DTensor this rank's shard.

    Biases and norms do not decay.

    Raises:
        ValueError: There is no such parameter, or one is a DTensor whose shards are no runs of its elements.
    """
    found = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found.append((name, local(parameter), parameter.dim() >= 2, first_element(name, parameter)))
    if not found:
        raise ValueError("SeedReplay: model: expected parameters that require gradients, got none")
    return found


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """Returns the mesh of the ranks that have the trained parameters in shards; None if these are plain tensors.

    The model is resharded first: a module whose weights FSDP2 has gathered shows them as plain tensors.

    Raises:
        ValueError: Parameters are on different meshes.
    """
    reshard(model)
    found: tuple[str, DeviceMesh] | None = None
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or not isinstance(parameter, DTensor):
            continue
        if found is not None and parameter.device_mesh != found[1]:
            raise ValueError(
                f"SeedReplay: parameter {name!r}: expected the mesh of {found[0]!r}, {found[1]}, got {parameter.device_mesh}"
            )
        found = found or (name, parameter.device_mesh)
    return None if found is None else found[1]


def first_element(name: str, parameter: torch.Tensor) -> int:
    """Returns the element of the whole parameter with which this rank's shard begins; 0 of a plain tensor.

    Raises:
        ValueError: The shard is no run of the whole parameter's elements.
    """
    if not isinstance(parameter, DTensor):
        return 0
    sharded = [placement for placement in parameter.placements if type(placement) is not Replicate]
    if len(sharded) > 1 or any(type(placement) is not Shard or placement.dim != 0 for placement in sharded):
        raise ValueError(
            f"SeedReplay: parameter {name!r}: expected Shard(0) on one dimension of the mesh and Replicate on others, so that a "
            f"shard is a run of elements, got {parameter.placements}"
        )
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    if tuple(local(parameter).shape) != tuple(shape):
        raise ValueError(
            f"SeedReplay: parameter {name!r}: expected a shard of shape {tuple(shape)}, got {tuple(local(parameter).shape)}"
        )
    return offset[0] * math.prod(shape[1:]) if sharded and 0 not in shape else 0


def like(shard: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of a shard's values as the parameter's DTensor is; of a plain parameter the tensor itself."""
    if not isinstance(parameter, DTensor):
        return shard
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a whole tensor in host memory. Collective for a DTensor."""
    if isinstance(tensor, DTensor):
        with exact():
            tensor = tensor.full_tensor()
    return tensor.detach().cpu()


def part_of(tensor: torch.Tensor, first: int, shard: torch.Tensor) -> torch.Tensor:
    """Returns the part of a whole tensor that a shard, which begins with an element `first`, has."""
    return tensor.reshape(-1)[first : first + shard.numel()].view(shard.shape)


def expect_same_memory(own: Sequence[Entry], parameters: Sequence[torch.Tensor]) -> None:
    """Checks that shards are where parameters have them.

    Raises:
        ValueError: A parameter has got other memory, as by `model.to` or an assigning `load_state_dict`.
    """
    for (name, shard, _, _), parameter in zip(own, parameters, strict=True):
        if local(parameter).data_ptr() != shard.data_ptr():
            raise ValueError(
                f"SeedReplay: parameter {name!r}: expected the memory that it had when the optimizer was made, got other: move "
                "and load the model before"
            )


def layout(name: str, parameter: torch.Tensor) -> str:
    """Returns name, shape, type and placements of a parameter, which ranks of a machine compare."""
    placements = str(parameter.placements) if isinstance(parameter, DTensor) else "plain"
    return f"{name}:{parameter.dtype}{list(parameter.shape)}:{placements}".replace(" ", "")
