"""What the core of an outer loop is made of, checked on each rank before all ranks compare it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torch_lowcomm.diloco.inner_optimizer import OptimizerAround
from torch_lowcomm.diloco.options import DiLoCoXOptions
from torch_lowcomm.diloco.parameters import Held, held, named_buffers, named_parameters


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
        """Checks the arguments of `DiLoCoX`.

        Args:
            optimizer: The inner optimizer.
            model: Names the tensors, or None.
            options: Fields of `DiLoCoXOptions` by name.
            site: Global ranks of this rank's site.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: An option or a parameter is wrong.
        """
        given = DiLoCoXOptions.named(**options)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"DiLoCoX: expected an optimizer, got {type(optimizer).__name__}")
        if isinstance(optimizer, OptimizerAround):
            raise TypeError("DiLoCoX: expected an inner optimizer, got a DiLoCoX: one outer loop a model")
        if given.average_buffers and model is None:
            raise ValueError("DiLoCoX: average_buffers: expected model= too, got none")
        buffers = named_buffers(model) if given.average_buffers and model is not None else []
        parameters = held(named_parameters(optimizer, model), site)
        return LoopInputs(given, given.for_core(), parameters, held(buffers, site))
