"""Perturbations of a model that FSDP2 has sharded: each rank perturbs its shards, and FSDP2 gathers them perturbed."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from torch_lowcomm import _C
from torch_lowcomm._reshard import reshard
from torch_lowcomm.seed_replay.perturbation import Perturbation


class InShards(Perturbation):
    """Sets this rank's shards to w + factor·z for an evaluation, and back from a copy of them.

    Values are those that `AtUse` makes, rounded once, so that a sharded machine measures what an unsharded one does.

    Args:
        core: Makes the perturbed shards.
        shards: The shards, in the order of the core.
        machine: Number of this machine, for its directions.
    """

    def __init__(self, core: _C.SeedReplay, shards: Sequence[torch.Tensor], machine: int) -> None:
        self._core, self._shards, self._machine = core, shards, machine

    @contextmanager
    def at(self, sample: int, factor: float) -> Iterator[None]:
        """Inside the context the shards are those of w + factor·z of a sample."""
        if factor == 0:
            yield
            return
        copies = [shard.clone() for shard in self._shards]
        try:
            with torch.no_grad():
                for number, shard in enumerate(self._shards):
                    shard.copy_(self._core.perturbed(number, self._machine, sample, factor))
            yield
        finally:
            with torch.no_grad():
                for shard, copy in zip(self._shards, copies, strict=True):
                    shard.copy_(copy)


class Resharding(Perturbation):
    """A perturbation of shards, around which FSDP2 forgets what it has gathered of them.

    Args:
        model: The model, whose modules FSDP2 has sharded.
        inner: The perturbation of the shards.
    """

    def __init__(self, model: nn.Module, inner: Perturbation) -> None:
        self._model, self._inner = model, inner

    @contextmanager
    def at(self, sample: int, factor: float) -> Iterator[None]:
        """Inside the context the model has the weights w + factor·z of a sample."""
        perturbed: AbstractContextManager[None] = self._inner.at(sample, factor)
        with perturbed:
            reshard(self._model)
            try:
                yield
            finally:
                reshard(self._model)

    def complete(self) -> bool:
        """As the inner one."""
        return self._inner.complete()

    def put_back(self) -> None:
        """As the inner one."""
        self._inner.put_back()

    def applied(self, record: bytes) -> None:
        """As the inner one."""
        self._inner.applied(record)
        reshard(self._model)

    def restore(self) -> None:
        """As the inner one."""
        self._inner.restore()
        reshard(self._model)

    def take(self) -> None:
        """As the inner one."""
        self._inner.take()
        reshard(self._model)
