"""Lists the tensors that an outer loop averages, with their names."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a tensor: its shard of a DTensor (FSDP2, HSDP), else the tensor. It shares memory."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def named_parameters(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> list[tuple[str, torch.Tensor]]:
    """Returns (name, this rank's part) of the parameters that an optimizer trains, in the optimizer's order.

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
        found.append((name, local(parameter)))
    return found


def named_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Returns (name, this rank's part) of a model's floating-point buffers, for example running means."""
    return [(name, local(buffer)) for name, buffer in model.named_buffers() if buffer.is_floating_point()]
