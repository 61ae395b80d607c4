"""The weights that seed replay trains, and the way in which a model is perturbed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torch_lowcomm import _C
from torch_lowcomm.diloco.parameters import local
from torch_lowcomm.seed_replay.at_use import AtUse
from torch_lowcomm.seed_replay.in_place import InPlace
from torch_lowcomm.seed_replay.in_shards import InShards, Resharding
from torch_lowcomm.seed_replay.perturbation import Perturbation
from torch_lowcomm.seed_replay.shards import first_element

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
        if not parameter.requires_grad:
            continue
        found.append((name, local(parameter), parameter.dim() >= 2, first_element(name, parameter)))
    if not found:
        raise ValueError("SeedReplay: model: expected parameters that require gradients, got none")
    return found


def core_and_perturbation(
    model: nn.Module,
    own: list[Entry],
    options: dict[str, Any],
    machine: int,
    *,
    perturb: str,
    restore_every: int,
    sharded: bool,
) -> tuple[_C.SeedReplay, Perturbation]:
    """Makes the core of the weights that machines agree on, and the way to perturb the model.

    Args:
        model: The model that is evaluated.
        own: Its parameters that are trained.
        options: Options of the core. With a base the parameters give up their memory.
        machine: Number of this machine, for its directions.
        perturb: "at-use" or "in-place".
        restore_every: With "in-place": iterations from one restoring of the weights to the next.
        sharded: Whether FSDP2 has sharded the model; then the core is that of this rank's shards.

    Returns:
        (core, perturbation).
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    shapes = [list(p.shape) for p in parameters] if sharded else None
    core, tensors = _C.SeedReplay(own, options, shapes), [tensor for _, tensor, _, _ in own]
    if perturb == "in-place":
        copied = [tensor.clone() for tensor in tensors]
        second = [(name, copy, decays, first) for (name, _, decays, first), copy in zip(own, copied, strict=True)]
        copies = _C.SeedReplay(second, options, shapes)
        in_place = InPlace(tensors, core, copies, copied, machine, restore_every)
        return copies, Resharding(model, in_place) if sharded else in_place
    if sharded:
        return core, Resharding(model, InShards(core, tensors, machine))
    numbers = {id(p): number for number, p in enumerate(parameters)}
    quantized = bool(options["base"])
    if quantized:
        for parameter in parameters:
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return core, AtUse(model, core, numbers, machine, quantized=quantized)
