"""Perturbations of weights in their own memory, and what all ways to perturb a model while it is evaluated have in common."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from torch_lowcomm import _C
from torch_lowcomm._reshard import reshard


class Perturbation:
    """The base of `AtUse`, `InPlace` and, for shards of FSDP2, `InShards`: the model's weights are the core's own."""

    sharded: nn.Module | None = None  # a model whose gathered weights FSDP2 forgets where its shards change

    def at(self, sample: int, factor: float) -> AbstractContextManager[None]:
        """Inside the context the model has the weights w + factor·z of a sample."""
        raise NotImplementedError

    def complete(self) -> bool:
        """After an evaluation at a factor other than 0: whether all parameters were perturbed. If not, evaluate again."""
        return True

    def put_back(self) -> None:
        """Ends an iteration's evaluations."""

    def applied(self, record: bytes) -> None:
        """Follows the core, which has applied a record."""
        self.restore()

    def restore(self) -> None:
        """Sets the model's weights to the core's."""
        reshard(self.sharded)

    def take(self) -> None:
        """Sets the core's weights to the model's, which were loaded."""
        reshard(self.sharded)

    @contextmanager
    def _evaluated(self) -> Iterator[None]:
        reshard(self.sharded)
        try:
            yield
        finally:
            reshard(self.sharded)


class InPlace(Perturbation):
    """The paper's way: θ + εz, θ − εz, θ, with the roundings that this leaves (MeZO, algorithm 1; Just One Byte, section 2).
    `copies`, the core of `copied`, takes every update and no perturbation; machines compare it. The weights are set to it
    every `restore_every` iterations (n_b: 1 in the paper; 16 is enough in practice).
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
        """As `Perturbation.at`; the weights stay so until the next call."""
        if self._at is not None and self._at[0] == sample:
            self._weights.perturb(self._machine, sample, factor - self._at[1])
        else:
            self.put_back()
            self._weights.perturb(self._machine, sample, factor)
        self._at = (sample, factor)
        with self._evaluated():
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
            reshard(self.sharded)
        else:
            self.restore()

    def take(self) -> None:
        """Sets the copies to the weights, which were loaded."""
        copy_all(self._parameters, to=self._copied)
        reshard(self.sharded)

    def restore(self) -> None:
        """Sets the weights to the copies."""
        self._at = None
        copy_all(self._copied, to=self._parameters)
        self._weights.iteration = self._copies.iteration
        reshard(self.sharded)


class InShards(Perturbation):
    """Sets this rank's shards to w + factor·z for an evaluation, and back from a copy of them. FSDP2 gathers them perturbed.
    Values are those that `AtUse` makes, rounded once, so that a sharded machine measures what an unsharded one does.
    """

    def __init__(self, core: _C.SeedReplay, shards: Sequence[torch.Tensor], machine: int) -> None:
        self._core, self._shards, self._machine = core, shards, machine

    @contextmanager
    def at(self, sample: int, factor: float) -> Iterator[None]:
        """As `Perturbation.at`."""
        if factor == 0:
            with self._evaluated():
                yield
            return
        copies = [shard.clone() for shard in self._shards]
        try:
            with torch.no_grad():
                for number, shard in enumerate(self._shards):
                    shard.copy_(self._core.perturbed(number, self._machine, sample, factor))
            with self._evaluated():
                yield
        finally:
            copy_all(copies, to=self._shards)


def copy_all(tensors: Sequence[torch.Tensor], *, to: Sequence[torch.Tensor]) -> None:
    """Copies the values of tensors to others, in their order."""
    with torch.no_grad():
        for target, tensor in zip(to, tensors, strict=True):
            target.copy_(tensor)
