"""One step of a schedule whose samples have numbers."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_lowcomm import _C
from torch_lowcomm.groups import backend_of
from torch_lowcomm.pipeline.boundary import edge_name
from torch_lowcomm.pipeline.stage import Stage

_COMPARISON = 1 << 20  # the first of the channels on which two sides compare their caches


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
        ValueError: There is a cache and no samples, a sample comes twice in the batch, the batch is no multiple of the
            micro-batches, or the stages had another number of them before; before anything is sent.
        RuntimeError: A message of an earlier step failed.
        torch.distributed.DistBackendError: A peer or the network failed, or two stages mean different messages.
    """
    stages = _stages_of(schedule)
    numbers = None if samples is None else [int(sample) for sample in samples]
    chunks = schedule._n_microbatches
    if numbers is not None:
        _check(numbers, x, chunks)
    if numbers is None and any(stage.cache is not None for stage in stages):
        raise ValueError("a step with a cache: expected samples=, got none")
    compared = sum(stage.cache.loads for stage in stages if stage.cache is not None)
    if getattr(schedule, "_lowcomm_compared", None) != compared:
        _compare_caches(stages)
        schedule._lowcomm_compared = compared
    if numbers is not None:
        size = len(numbers) // chunks
        for stage in stages:
            stage.set_samples([numbers[i * size : (i + 1) * size] for i in range(chunks)])
    return _run(schedule, schedule.step, (x, *args), target, kwargs)


def evaluate(schedule: Any, x: torch.Tensor | None = None, *args: Any, target: Any = None, **kwargs: Any) -> Any:
    """Runs schedule.eval() on one batch, called alike on all ranks of the pipeline, and waits for what it sends.

    Args:
        schedule: As step().
        x: As step().
        args: As step().
        target: As step(); needed where the schedule has a loss.
        kwargs: As schedule.eval().

    Returns:
        What schedule.eval() returns.

    Raises:
        RuntimeError: A message of an earlier step failed.
        torch.distributed.DistBackendError: A peer or the network failed, or two stages mean different messages.
    """
    with torch.no_grad():
        return _run(schedule, schedule.eval, (x, *args), target, kwargs)


def _run(schedule: Any, run: Any, inputs: tuple[Any, ...], target: Any, kwargs: dict[str, Any]) -> Any:
    """One pass of a schedule; where it fails all of the rank's stages refuse the next one."""
    stages = _stages_of(schedule)
    for stage in stages:
        stage.expect_micro_batches(schedule._n_microbatches)
    if any(stage.is_last for stage in stages):
        kwargs = {"target": target, **kwargs}
    try:
        result = run(*(inputs if any(stage.is_first for stage in stages) else ()), **kwargs)
        for stage in stages:
            stage.finish()
    except BaseException as error:
        for stage in stages:
            stage.fail(str(error))
        raise
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
    if not all(0 <= number < 2**63 for number in numbers):
        raise ValueError(f"samples: expected numbers of 0...2^63 - 1, got {min(numbers)} to {max(numbers)}")
    if len(numbers) % chunks:
        raise ValueError(f"samples: expected a multiple of the {chunks} micro-batches, got {len(numbers)}")
    if x is not None and x.shape[0] != len(numbers):
        raise ValueError(f"samples: expected one for each of the batch's {x.shape[0]} rows, got {len(numbers)}")


def _compare_caches(stages: list[Stage]) -> None:
    """Both sides of each boundary compare what they remember, in the order of the boundaries on every rank.

    Raises:
        ValueError: One side of a boundary has a cache and the other has none; on both.
    """
    by_index = {stage.stage_index: stage for stage in stages}
    ranks, count = stages[0].stage_index_to_group_rank, stages[0].num_stages
    backend, me = backend_of(stages[0].group), dist.get_rank(stages[0].group)
    edges = sorted({(i - 1, False) for i in by_index if i > 0} | {(i, True) for i in by_index if i + 1 < count})
    for boundary, sends in edges:
        peer = ranks[boundary + 1 if sends else boundary]
        if peer == me:
            continue
        cache = by_index[boundary if sends else boundary + 1].cache
        rows = torch.empty(0, 4, dtype=torch.int64) if cache is None else cache.rows(boundary, sends)
        channel = _C.Channel(
            backend,
            peer,
            _COMPARISON + boundary,
            dtype=torch.int64,
            codec="",
            first="",
            channels=1,
            memory=None,
            edge=f"caches of boundary {boundary}",
            part="",
        )
        mine = -1 if cache is None else len(rows)
        theirs = int(_exchange(channel, torch.tensor([mine]), torch.empty(1, dtype=torch.int64)))
        if (mine < 0) != (theirs < 0):
            raise ValueError(
                f"cache: expected one on both sides of the boundary behind stage {boundary}, or none; rank {me} has "
                f"{'none' if mine < 0 else 'one'}, rank {peer} has {'none' if theirs < 0 else 'one'}"
            )
        if cache is not None:
            others = torch.empty(theirs, 4, dtype=torch.int64)
            forgotten = cache.keep_equal(boundary, sends, _exchange(channel, rows, others))
            if sends and forgotten:
                backend.count_forgotten(f"send {edge_name(boundary, gradients=False)}", forgotten)


def _exchange(channel: _C.Channel, mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    receive = channel.recv(theirs, [])
    send = channel.send(mine.contiguous(), [])
    receive.wait()
    send.wait()
    return theirs
