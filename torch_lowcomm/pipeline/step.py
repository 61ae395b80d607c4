"""One step of a schedule whose samples have numbers."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_lowcomm import _C
from torch_lowcomm.groups import backend_of
from torch_lowcomm.pipeline.cache import Cache
from torch_lowcomm.pipeline.stage import Stage

_AGREEMENT = 1 << 20  # the first of the channels on which two sides compare their caches


def step(
    schedule: Any,
    x: torch.Tensor | None = None,
    *args: Any,
    samples: torch.Tensor | Sequence[int] | None = None,
    target: torch.Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Runs one step of a schedule of torch's, called alike on all ranks of the pipeline.

    Args:
        schedule: A schedule whose stages are `lc.pipeline.Stage`.
        x: The batch, [samples, ...], on every rank; the rank with the first stage uses it.
        args: Further inputs of the first stage.
        samples: The number of each sample of the batch, int64 [samples], each once; the same on all ranks. Needed with a cache.
        target: As schedule.step(), on every rank; the rank with the last stage uses it.
        kwargs: As schedule.step().

    Returns:
        What schedule.step() returns.

    Raises:
        ValueError: A sample comes twice in the batch, or the batch is no multiple of the micro-batches; before anything is sent.
        torch.distributed.DistBackendError: A peer or the network failed, or two stages mean different messages.
    """
    stages = _stages_of(schedule)
    numbers = None if samples is None else [int(sample) for sample in samples]
    chunks = schedule._n_microbatches
    if numbers is not None:
        _check(numbers, x, chunks)
        parts = [numbers[i * len(numbers) // chunks : (i + 1) * len(numbers) // chunks] for i in range(chunks)]
    caches = {id(stage.cache): stage.cache for stage in stages if stage.cache is not None}
    if caches and not getattr(schedule, "_lowcomm_agreed", False):
        for cache in caches.values():
            _agree([stage for stage in stages if stage.cache is cache], cache)
        schedule._lowcomm_agreed = True
    for stage in stages:
        stage.set_samples(None if numbers is None else parts)
    inputs = (x, *args) if x is not None and any(stage.is_first for stage in stages) else ()
    if any(stage.is_last for stage in stages):
        kwargs = {"target": target, **kwargs}
    try:
        result = schedule.step(*inputs, **kwargs)
        for stage in stages:
            stage.finish()
    finally:
        for stage in stages:
            stage.set_samples(None)
    return result


def _stages_of(schedule: Any) -> list[Stage]:
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    for stage in stages:
        if not isinstance(stage, Stage):
            raise TypeError(f"schedule: expected stages of type lc.pipeline.Stage, got {type(stage).__name__}")
    return list(stages)


def _check(numbers: list[int], x: torch.Tensor | None, chunks: int) -> None:
    if len(set(numbers)) != len(numbers):
        twice = next(number for i, number in enumerate(numbers) if number in numbers[:i])
        raise ValueError(f"samples: expected each once in a batch, got sample {twice} again")
    if len(numbers) % chunks:
        raise ValueError(f"samples: expected a multiple of the {chunks} micro-batches, got {len(numbers)}")
    if x is not None and x.shape[0] != len(numbers):
        raise ValueError(f"samples: expected one for each of the batch's {x.shape[0]} rows, got {len(numbers)}")


def _agree(stages: list[Stage], cache: Cache) -> None:
    """Both sides of each boundary compare what they remember, in the order of the boundaries on every rank."""
    mine = {stage.stage_index for stage in stages}
    ranks = stages[0].stage_index_to_group_rank
    backend = backend_of(stages[0].group)
    me = dist.get_rank(stages[0].group)
    edges = sorted({(i - 1, False) for i in mine if i > 0} | {(i, True) for i in mine if i + 1 < stages[0].num_stages})
    for boundary, sends in edges:
        peer = ranks[boundary + 1 if sends else boundary]
        if peer == me:
            continue
        rows = cache.rows(boundary, sends)
        channel = _C.Channel(
            backend, peer, _AGREEMENT + boundary, dtype=torch.int64, codec="", first="", channels=1, memory=None
        )
        count = _exchange(channel, torch.tensor([len(rows)]), torch.empty(1, dtype=torch.int64))
        theirs = torch.empty(int(count), 4, dtype=torch.int64)
        cache.keep_equal(boundary, sends, _exchange(channel, rows, theirs))


def _exchange(channel: _C.Channel, mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    receive = channel.recv(theirs, [])
    send = channel.send(mine.contiguous(), [])
    receive.wait()
    send.wait()
    return theirs
