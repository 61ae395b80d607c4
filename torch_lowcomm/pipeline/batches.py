"""Batches whose samples keep their numbers from epoch to epoch."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch


def batches(
    dataset: Sequence[Any],
    *,
    batch: int,
    seed: int = 0,
    epochs: int = 1,
    shuffle: str = "epoch",
    replica: int = 0,
    replicas: int = 1,
) -> Iterator[tuple[Any, ...]]:
    """Yields the batches of numbered samples, the same on every stage of a pipeline.

    Each data-parallel replica has a fixed part of the dataset, the same in all epochs and as large as the others', so that its
    stages meet their samples again. A last batch that is not full is left out.

    Args:
        dataset: Indexed by number; an entry is a tensor or a tuple of tensors, of one shape for all entries.
        batch: Samples in a batch.
        seed: Of the parts and the order.
        epochs: Passes over the part.
        shuffle: "epoch": another order in each epoch. "once": one order for all.
        replica: Whose part it is, 0...replicas - 1.
        replicas: Parts in all.

    Yields:
        samples: int64 [batch], the entries' numbers in `dataset`; then for each field of an entry one tensor [batch, ...].

    Raises:
        ValueError: `shuffle` is neither of the two, `replica` is none of the replicas, or a part has less than one batch.
    """
    if shuffle not in ("epoch", "once"):
        raise ValueError(f"shuffle: expected 'epoch' or 'once', got {shuffle!r}")
    if not 0 <= replica < replicas:
        raise ValueError(f"replica: expected one of 0...{replicas - 1}, got {replica}")
    generator = torch.Generator().manual_seed(seed)
    each = len(dataset) // replicas  # equal parts: replicas take equally many steps
    part = torch.randperm(len(dataset), generator=generator)[replica * each : (replica + 1) * each]
    if len(part) < batch:
        raise ValueError(f"batch: expected at most the {len(part)} samples of a replica's part, got {batch}")
    for epoch in range(epochs):
        if shuffle == "epoch":
            generator.manual_seed(seed * 1_000_003 + epoch)
            order = part[torch.randperm(len(part), generator=generator)]
        else:
            order = part
        for at in range(0, len(order) - batch + 1, batch):
            samples = order[at : at + batch]
            entries = [dataset[int(i)] for i in samples]
            if isinstance(entries[0], tuple | list):
                yield (samples, *(torch.stack(list(field)) for field in zip(*entries, strict=True)))
            else:
                yield samples, torch.stack(entries)
