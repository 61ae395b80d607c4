"""Modules' own modes, training or not, around an evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(module: nn.Module, *, train: bool = False) -> Iterator[None]:
    """Sets evaluation mode, or with `train` training mode; each part has its own again afterwards."""
    modes = {part: part.training for part in module.modules()}
    try:
        module.train(train)
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
