"""Batches whose samples keep their numbers from epoch to epoch."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_lowcomm.pipeline.cache import Cache


def batches(
    dataset: Sequence[Any],
    *,
    batch: int,
    seed: int = 0,
    epochs: int = 1,
    shuffle: str = "epoch",
    last: str = "drop",
    replica: int = 0,
    replicas: int = 1,
    cache: Cache | None = None,
    group: dist.ProcessGroup | None = None,
) -> Iterator[tuple[Any, ...]]:
    """Yields the batches of numbered samples, the same on every stage of a pipeline.

    Each data-parallel replica has a part of the dataset and takes as many steps as the others. With "epoch" and "once" the part
    is the same in all epochs, so that the replica's stages meet their samples again. Stages and replicas agree because they are
    given the same arguments, from which all of it follows.

    Args:
        dataset: Indexed by number; an entry is a tensor or a tuple of tensors, of one shape for all entries.
        batch: Samples in a batch.
        seed: Of the parts and the order.
        epochs: Passes over the part.
        shuffle: "epoch": another order in each epoch. "once": one order for all. "global": other parts too; what a cache
            remembers of a sample moves with it, exactly and over the links between replicas, and costs more there than it
            saves unless those are fast.
        last: What becomes of an epoch's last batch where a part is no multiple of `batch`. "drop": it is left out; parts are
            equal, and up to replicas - 1 samples are in none. "fill": it goes on with the first samples of the epoch's order,
            which come twice in that epoch and never twice in a batch; every sample is in a part, and some parts have one more
            than others.
        replica: Whose part it is, 0...replicas - 1.
        replicas: Parts in all.
        cache: Of the rank. Where it is in files, each batch's slots are read while the one before it computes. "global" moves its
            slots.
        group: With "global", a cache and several replicas: the ranks that have this rank's stages, one a replica, in order.

    Yields:
        samples: int64 [batch], the entries' numbers in `dataset`; then for each field of an entry one tensor [batch, ...].

    Raises:
        ValueError: `shuffle` or `last` is none of these, `replica` is none of the replicas, `batch` is below 1 or larger than a
            part, or slots are to be moved without a group, or in one of other ranks than the replicas.
        torch.distributed.DistBackendError: Slots could not be moved.
    """
    if shuffle not in ("epoch", "once", "global"):
        raise ValueError(f"shuffle: expected 'epoch', 'once' or 'global', got {shuffle!r}")
    if last not in ("drop", "fill"):
        raise ValueError(f"last: expected 'drop' or 'fill', got {last!r}")
    if not 0 <= replica < replicas:
        raise ValueError(f"replica: expected one of 0...{replicas - 1}, got {replica}")
    if batch < 1:
        raise ValueError(f"batch: expected 1 or more, got {batch}")
    if len(dataset) // replicas < batch:
        raise ValueError(
            f"batch: expected at most the {len(dataset) // replicas} samples of a replica's part, got {batch}"
        )
    moves = shuffle == "global" and cache is not None and replicas > 1
    if moves:
        _expect_group(group, replica, replicas)
    parts = _Parts(len(dataset), replicas, seed, shuffle, fills=last == "fill")
    numbers = ((epoch, samples) for epoch in range(epochs) for samples in parts.batches(epoch, replica, batch))
    before, following = -1, next(numbers, None)
    while following is not None:
        epoch, samples = following
        if cache is not None and group is not None and moves and epoch != before:
            cache.move(parts.owners(epoch), group)
        before, following = epoch, next(numbers, None)
        if cache is not None and following is not None:
            cache.read_ahead(following[1])
        entries = [dataset[int(i)] for i in samples]
        if isinstance(entries[0], tuple | list):
            yield (samples, *(torch.stack(list(field)) for field in zip(*entries, strict=True)))
        else:
            yield samples, torch.stack(entries)


class _Parts:
    """Which samples a replica has, and in which order, from one seed."""

    def __init__(self, samples: int, replicas: int, seed: int, shuffle: str, *, fills: bool) -> None:
        self._samples, self._replicas, self._seed, self._shuffle, self._fills = samples, replicas, seed, shuffle, fills
        # Where the parts begin and end in an epoch's order; samples behind the last part are in none.
        used = samples if fills else samples // replicas * replicas
        self._bounds = [used * replica // replicas for replica in range(replicas + 1)]
        self._generator = torch.Generator()
        self._all = self._permutation(samples, seed)

    def batches(self, epoch: int, replica: int, batch: int) -> Iterator[torch.Tensor]:
        """The numbers of each batch."""
        part = self._part(epoch, replica)
        if self._shuffle == "epoch":
            part = part[self._permutation(len(part), self._seed * 1_000_003 + epoch)]
        largest = -(-self._bounds[-1] // self._replicas)  # of the parts: replicas take equally many steps
        steps = -(-largest // batch) if self._fills else largest // batch
        for step in range(steps):
            yield part[torch.arange(step * batch, (step + 1) * batch) % len(part)]

    def owners(self, epoch: int) -> torch.Tensor:
        """int64 [samples], the replica of each sample; -1 for those of no part."""
        owners = torch.full((self._samples,), -1)
        for replica in range(self._replicas):
            owners[self._part(epoch, replica)] = replica
        return owners

    def _part(self, epoch: int, replica: int) -> torch.Tensor:
        order = self._all  # all samples, part after part
        if self._shuffle == "global":
            order = self._permutation(self._samples, self._seed * 1_000_003 + epoch)
        return order[self._bounds[replica] : self._bounds[replica + 1]]

    def _permutation(self, samples: int, seed: int) -> torch.Tensor:
        return torch.randperm(samples, generator=self._generator.manual_seed(seed))


def _expect_group(group: dist.ProcessGroup | None, replica: int, replicas: int) -> None:
    if group is None:
        raise ValueError("group: expected the ranks of this stage in all replicas, for slots to move, got none")
    if (size := dist.get_world_size(group)) != replicas:
        raise ValueError(f"group: expected a rank for each of the {replicas} replicas, got {size}")
    if (rank := dist.get_rank(group)) != replica:
        raise ValueError(f"group: expected this rank at place {replica}, its replica's number, got {rank}")
