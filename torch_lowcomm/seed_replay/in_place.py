"""The paper's way to perturb: the weights themselves, to and fro; now and then a copy puts them right."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from torch_lowcomm import _C
from torch_lowcomm.seed_replay.perturbation import Perturbation


class InPlace(Perturbation):
    """θ + εz, θ − εz, θ: in place, with the roundings that this leaves (MeZO, algorithm 1; Just One Byte, section 2).

    All machines keep a copy that no perturbation touches and that takes every update. The weights are set to it every
    `restore_every` iterations. In between they drift apart by roundings, and so machines compare the copies.

    Args:
        parameters: The model's parameters, in the order of the cores.
        weights: The core of the model's parameters.
        copies: The core of the copies.
        copied: The copies.
        machine: Number of this machine, for its directions.
        restore_every: n_b: 1 in the paper; 16 is enough in practice.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        weights: _C.SeedReplay,
        copies: _C.SeedReplay,
        copied: Sequence[torch.Tensor],
        machine: int,
        restore_every: int,
    ) -> None:
        self._parameters, self._copied = parameters, copied
        self._weights, self._copies = weights, copies
        self._machine, self._restore_every = machine, restore_every
        self._at: tuple[int, float] | None = None  # the sample and the factor of the perturbation in place

    @contextmanager
    def at(self, sample: int, factor: float) -> Iterator[None]:
        """Inside the context, and until the next call, the model has the weights w + factor·z of a sample."""
        if self._at is not None and self._at[0] == sample:
            self._weights.perturb(self._machine, sample, factor - self._at[1])
        else:
            self.put_back()
            self._weights.perturb(self._machine, sample, factor)
        self._at = (sample, factor)
        yield

    def put_back(self) -> None:
        """Takes the last perturbation back, except its roundings."""
        if self._at is not None:
            self._weights.perturb(self._machine, self._at[0], -self._at[1])
            self._at = None

    def applied(self, record: bytes) -> None:
        """Lets the weights follow the copies, which have applied a record."""
        if self._weights.iteration + 1 == self._copies.iteration and self._copies.iteration % self._restore_every:
            self._weights.apply(record)
        else:
            self.restore()

    def take(self) -> None:
        """Sets the copies to the weights, which were loaded."""
        with torch.no_grad():
            for parameter, copy in zip(self._parameters, self._copied, strict=True):
                copy.copy_(parameter)

    def restore(self) -> None:
        """Sets the weights to the copies."""
        self._at = None
        with torch.no_grad():
            for parameter, copy in zip(self._parameters, self._copied, strict=True):
                parameter.copy_(copy)
        self._weights.iteration = self._copies.iteration
