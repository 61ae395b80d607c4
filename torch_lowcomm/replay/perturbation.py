"""How a model comes to have perturbed weights while it is evaluated: where it uses them, or in place."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from torch_lowcomm import _C
from torch_lowcomm.replay.at_use import AtUse
from torch_lowcomm.replay.in_place import InPlace
from torch_lowcomm.replay.parameters import Entry


class Perturbation(Protocol):
    """The interface that both ways give the optimizer."""

    def at(self, sample: int, factor: float) -> AbstractContextManager[None]:
        """Within it the model has the weights w + factor·z of a sample."""

    def complete(self) -> bool:
        """After an evaluation at a factor other than 0: whether it was at w + factor·z for all parameters; else again."""

    def put_back(self) -> None:
        """The iteration's evaluations are over."""

    def applied(self, record: bytes) -> None:
        """The core has taken a record."""

    def restore(self) -> None:
        """The model's weights are to be the core's, whatever they were."""

    def take(self) -> None:
        """The core's weights are to be the model's, which were loaded."""


def core_and_perturbation(
    model: nn.Module, own: list[Entry], options: dict[str, Any], machine: int, *, perturb: str, restore_every: int
) -> tuple[_C.SeedReplay, Perturbation]:
    """(core of the weights that machines agree on, perturbation).

    Args:
        model: To be evaluated.
        own: Its trained parameters.
        options: Of the core; with a base the parameters give up their memory.
        machine: Whose directions.
        perturb: "at-use" or "in-place".
        restore_every: Iterations, of "in-place".
    """
    core = _C.SeedReplay(own, options)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if perturb == "in-place":
        copied = [tensor.clone() for _, tensor, _, _ in own]
        beside = [(name, copy, decays, first) for (name, _, decays, first), copy in zip(own, copied, strict=True)]
        copies = _C.SeedReplay(beside, options)
        return copies, InPlace(parameters, core, copies, copied, machine, restore_every)
    numbers = {id(p): number for number, p in enumerate(parameters)}
    quantized = bool(options["base"])
    if quantized:
        for parameter in parameters:
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return core, AtUse(model, core, numbers, machine, quantized=quantized)
