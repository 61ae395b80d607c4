"""What seed replay moves of a model, and who a machine is."""

from __future__ import annotations

import hashlib

import torch
from torch import nn
from torch.distributed.tensor import DTensor

# Of the core's list: name, tensor, whether it decays, the element of the whole tensor that it begins with.
Entry = tuple[str, torch.Tensor, bool, int]


def entries(model: nn.Module) -> list[Entry]:
    """The parameters that require gradients, in the order of the model's names. Biases and norms do not decay.

    Raises:
        ValueError: There is none, or one is a shard: perturbations where weights are used would gather it.
    """
    found = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"SeedReplay: parameter {name!r}: expected a plain tensor, got a DTensor: each machine holds the whole model"
            )
        found.append((name, parameter.detach(), parameter.dim() >= 2, 0))
    if not found:
        raise ValueError("SeedReplay: model: expected parameters that require gradients, got none")
    return found


def machine_number(machine_id: int | str) -> int:
    """The 64-bit number that stands for a machine in messages and directions: itself, or of a text the first 8 bytes of its
    SHA-256, little-endian.

    Raises:
        TypeError: Neither.
        ValueError: A number that has more than 64 bits, or is 2^64 - 1, which is no machine's; an empty text.
    """
    if isinstance(machine_id, str):
        if not machine_id:
            raise ValueError("SeedReplay: machine_id: expected a text that is not empty, got ''")
        return int.from_bytes(hashlib.sha256(machine_id.encode()).digest()[:8], "little")
    if not isinstance(machine_id, int) or isinstance(machine_id, bool):
        raise TypeError(f"SeedReplay: machine_id: expected an int or a str, got {type(machine_id).__name__}")
    if not 0 <= machine_id < 2**64 - 1:
        raise ValueError(f"SeedReplay: machine_id: expected 0 to 2^64 - 2, got {machine_id}")
    return machine_id
