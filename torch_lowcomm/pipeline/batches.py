"""Batches whose samples keep their numbers from epoch to epoch."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

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
        shuffle: "epoch": another order in each epoch. "once": one order for all. "global": other parts too, of which a replica's
            cache remembers the samples that it had before: with several replicas most visits are then first ones.
        last: What becomes of an epoch's last batch where a part is no multiple of `batch`. "drop": it is left out; parts are
            equal, and up to replicas - 1 samples are in none. "fill": it goes on with the first samples of the epoch's order,
            which come twice in that epoch and never twice in a batch; every sample is in a part, and some parts have one more
            than others.
        replica: Whose part it is, 0...replicas - 1.
        replicas: Parts in all.
        cache: Of the rank, in files: each batch's slots are read while the one before it computes.

    Yields:
        samples: int64 [batch], the entries' numbers in `dataset`; then for each field of an entry one tensor [batch, ...].

    Raises:
        ValueError: `shuffle` or `last` is none of these, `replica` is none of the replicas, or `batch` is below 1 or above a
            part's samples.
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
    numbers = (
        samples
        for epoch in range(epochs)
        for samples in _of_epoch(len(dataset), epoch, batch, seed, shuffle, replica, replicas, fills=last == "fill")
    )
    following = next(numbers, None)
    while following is not None:
        samples, following = following, next(numbers, None)
        if cache is not None and following is not None:
            cache.read_ahead(following)
        entries = [dataset[int(i)] for i in samples]
        if isinstance(entries[0], tuple | list):
            yield (samples, *(torch.stack(list(field)) for field in zip(*entries, strict=True)))
        else:
            yield samples, torch.stack(entries)


def _of_epoch(
    samples: int, epoch: int, batch: int, seed: int, shuffle: str, replica: int, replicas: int, *, fills: bool
) -> Iterator[torch.Tensor]:
    """The numbers of each batch of a replica in an epoch, from one seed."""
    generator = torch.Generator()

    def permutation(count: int, seed: int) -> torch.Tensor:
        return torch.randperm(count, generator=generator.manual_seed(seed))

    seed_of_epoch = seed * 1_000_003 + epoch
    order = permutation(samples, seed_of_epoch if shuffle == "global" else seed)  # all samples, part after part
    used = samples if fills else samples // replicas * replicas  # the others are in no part
    part = order[used * replica // replicas : used * (replica + 1) // replicas]
    if shuffle == "epoch":
        part = part[permutation(len(part), seed_of_epoch)]
    largest = -(-used // replicas)  # of the parts: replicas take equally many steps
    for step in range(-(-largest // batch) if fills else largest // batch):
        yield part[torch.arange(step * batch, (step + 1) * batch) % len(part)]
