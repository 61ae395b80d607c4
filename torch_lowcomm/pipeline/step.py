"""One step of a schedule whose samples have numbers."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_lowcomm.groups import backend_of
from torch_lowcomm.pipeline.cache import list_of
from torch_lowcomm.pipeline.stage import Stage


def step(
    schedule: Any,
    x: torch.Tensor | None = None,
    *args: Any,
    samples: torch.Tensor | Sequence[int] | None = None,
    target: torch.Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Runs one step of a schedule of torch's, called in the same order on all ranks of the pipeline.

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
            micro-batches, the stages had another number of them before, or, in the first step, two stages next to each other
            have other schedules, micro-batches, stages, tensors or caches; before a tensor is sent.
        RuntimeError: A message of an earlier step failed, perhaps after this rank's part of that step was over. `reset` makes
            the stages ready again.
        torch.distributed.DistBackendError: A peer or the network failed, two stages mean different messages, or another stage
            failed, whose reason it has.
    """
    stages = _stages_of(schedule)
    numbers = None if samples is None else list_of(samples)
    chunks = schedule._n_microbatches
    if numbers is not None:
        _check(numbers, x, chunks)
    if numbers is None and any(stage.cache is not None for stage in stages):
        raise ValueError("a step with a cache: expected samples=, got none")
    if getattr(schedule, "_lowcomm_compared", None) != _loads(stages):
        _compare(schedule, stages)
    return _run(schedule, schedule.step, (x, *args), target, kwargs, numbers)


def evaluate(schedule: Any, x: torch.Tensor | None = None, *args: Any, target: Any = None, **kwargs: Any) -> Any:
    """Runs schedule.eval() on one batch, called in the same order on all ranks of the pipeline, and waits for what it sends.

    Arguments, result and errors are as those of step(); keywords are those of schedule.eval(). `target` is needed where the
    schedule has a loss. torch empties a list `losses` before it adds those of this batch.
    """
    with torch.no_grad():
        return _run(schedule, schedule.eval, (x, *args), target, kwargs)


def reset(schedule: Any) -> None:
    """Makes the stages ready for steps after one that failed, called in the same order on all ranks of the pipeline.

    A step fails on all ranks: on those whose part of it is over in the next one. Nothing of it is under way afterwards, and
    the caches of both sides of each boundary are equal: what one side alone had committed is forgotten. Gradients that the
    step has added to are the caller's to clear, and weights that ranks have stepped with are the caller's to restore. Where a
    stage is sharded by FSDP2, or the first step failed, make a new schedule too; ranks that share such a stage go on only
    where they have failed between the same two collectives of FSDP2. A group that has ended, by a peer's death or a time-out,
    is not reset, which is a DistBackendError: make a new one, and new stages with the same caches.
    """
    stages = _stages_of(schedule)
    for stage in stages:
        stage.messages.fail("the schedule was reset")
    for stage in stages:
        stage.resume()
    # torch goes on with those of the step that failed.
    for left in ("_internal_losses", "fwd_recv_ops", "bwd_recv_ops"):
        getattr(schedule, left, {}).clear()
    _compare(schedule, stages)


def _run(
    schedule: Any,
    run: Any,
    inputs: tuple[Any, ...],
    target: Any,
    kwargs: dict[str, Any],
    numbers: list[int] | None = None,
) -> Any:
    """One pass of a schedule on samples of these numbers; where it fails all of the rank's stages refuse the next one."""
    stages, chunks = _stages_of(schedule), schedule._n_microbatches
    for stage in stages:
        stage.expect_micro_batches(chunks)
    if numbers is not None:
        size = len(numbers) // chunks
        for stage in stages:
            stage.messages.samples = [numbers[i * size : (i + 1) * size] for i in range(chunks)]
    if any(stage.is_last for stage in stages):
        kwargs = {"target": target, **kwargs}
    failed = f"rank {dist.get_rank(stages[0].group)}"
    try:
        result = run(*(inputs if any(stage.is_first for stage in stages) else ()), **kwargs)
        for stage in stages:
            stage.finish()
    except BaseException as error:
        for stage in stages:
            stage.messages.fail(f"{failed}: {type(error).__name__}: {error}")
        if not any(stage.begun or stage.tells_shapes for stage in stages):
            # Others wait for torch's own messages, which know of no withdrawal.
            backend_of(stages[0].group).abort()
        raise
    finally:
        for stage in stages:
            stage.messages.samples = None
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


def _loads(stages: list[Stage]) -> int:
    return sum(stage.cache.loads for stage in stages if stage.cache is not None)


def _compare(schedule: Any, stages: list[Stage]) -> None:
    """Both sides of each boundary compare how they were made and what they remember, boundary by boundary on every rank."""
    said = {"schedule": type(schedule).__name__, "micro-batches": str(schedule._n_microbatches)}
    sides = [(side, stage) for stage in stages for side in stage.messages.boundaries]
    for side, stage in sorted(sides, key=lambda pair: pair[0].number):
        sends = side.number == stage.stage_index
        side.compare({**said, **stage.options_to_compare(sends=sends)}, sends=sends)
    schedule._lowcomm_compared = _loads(stages)
