"""Stages of a constrained decoder that fail or are killed: named on every rank, and nothing is trained on what is wrong."""

import os
import re
import signal

import pytest
import stages_case
import test_subspace_pipeline as pipelines
import torch
import torch.distributed as dist

import torch_lowcomm as lc

VICTIM = 1  # which is killed


def _step(r, schedule, x, y, ids=None):
    lc.pipeline.step(schedule, x, target=y, **({} if ids is False else {"ids": x if ids is None else ids}))


def _missing(r, stage, x):
    return False if r.rank == 1 else None


def _out_of_range(r, stage, x):
    return x + 1000 * (r.rank == 1)


def _rolled(r, stage, x):
    return x.roll(1, 0) if r.rank == 1 else None


def _shifted(r, stage, x):
    return x[:, :-1] if r.rank == 1 else None


@pytest.mark.parametrize(
    ("wrong", "expected", "steps"),
    [
        *(
            pytest.param(*row, 0, marks=stages_case.TELLS_SHAPES)
            for row in (
                (_missing, "stage 1 of 2: expected ids=, the tokens of the micro-batch"),
                (_out_of_range, r"stage 1 of 2: ids: expected 0\.\.\.127, got"),
                ("everywhere", r"stage 0 of 2: ids: expected 0\.\.\.127, got"),
                (_shifted, r"stage 1 of 2: expected coefficients \[2, 9, rank\] for the ids, got \[2, 10, 8\]"),
                (_rolled, "micro-batch 0: ids: expected the same as at the stage before"),
            )
        ),
        (_missing, "stage 1 of 2: expected ids=, the tokens of the micro-batch|ids: expected the same", 1),
        (_shifted, "ids: expected the same as at the stage before|for the ids", 1),
        (_rolled, "ids: expected the same as at the stage before", 1),
    ],
)
@pytest.mark.on("pair", group={"timeout_s": 300})  # longer than the test's: nothing here is heard by a time-out
def test_ids_that_will_not_do(r, wrong, expected, steps):
    """Both ranks hear the cause, at once, whether messages have been before or not, and nothing is trained."""
    schedule, (stage,) = pipelines.pipeline(r, "1F1B", r.size, torch.float32)
    x, y = pipelines._batch()
    if wrong == "everywhere":
        x = x + 1000
    for _ in range(steps):
        _step(r, schedule, x, y)
    weights = [p.detach().clone() for p in stage.submod.parameters()]
    with pytest.raises((ValueError, RuntimeError)) as failure:
        _step(r, schedule, x, y, None if wrong == "everywhere" else wrong(r, stage, x))
        _step(r, schedule, x, y)  # of a rank whose part of the first one was over
    said = f"{failure.value} {failure.value.__cause__}"  # torch's error has the module's as its cause
    assert re.search(expected, said), said
    assert all(torch.equal(a, b) for a, b in zip(weights, stage.submod.parameters(), strict=True))


def _not_a_number(r, stage, x):
    if r.rank == 0:
        with torch.no_grad():
            stage.submod.get_submodule("blocks").get_submodule("0").down.weight[0, 0] = float("nan")


@pytest.mark.parametrize("coefficients", ["fp32", "bf16", "minmax8:bucket=64"])
@pytest.mark.on("pair", group={})
def test_a_nan_in_an_activation_is_refused(r, coefficients):
    """A NaN in an activation is refused whatever coefficients travel as; both ranks hear of it, and go on without."""
    schedule, (stage,) = pipelines.pipeline(r, "1F1B", 2, torch.float32, coefficients=coefficients)
    x, y = pipelines._batch()
    _step(r, schedule, x, y)
    weights = [p.detach().clone() for p in stage.submod.parameters()]
    _not_a_number(r, stage, x)
    with pytest.raises((ValueError, RuntimeError), match="(?i)forward boundary 0, micro-batch 0.*nan"):
        _step(r, schedule, x, y)
        _step(r, schedule, x, y)
    with torch.no_grad():
        for p, before in zip(stage.submod.parameters(), weights, strict=True):
            p.copy_(before)
    lc.pipeline.reset(schedule)
    _step(r, schedule, x, y)


@pytest.mark.on("pair", group={})
def test_a_gradient_that_is_not_finite(r):
    """Exact gradients pass as torch's do, for a gradient scaler to see; clip_grad_norm tells all stages."""
    schedule, (stage,) = pipelines.pipeline(r, "1F1B", 2, torch.float32)
    optimizer = lc.SubspaceAdamW(stage.submod)
    if r.rank == 1:
        norm = stage.submod.get_submodule("norm")
        norm.register_forward_pre_hook(lambda module, inputs: stages_case.Spoil.apply(*inputs, False, True))
    x, y = pipelines._batch()
    _step(r, schedule, x, y)
    if r.rank == 1:  # every gradient of stage 0 came through the boundary, and none of the last one's head is spoilt
        assert stage.submod.get_submodule("head").weight.grad.isfinite().all()
    else:
        assert not any(p.grad.isfinite().all() for p in stage.submod.parameters())
    before = [p.detach().clone() for p in stage.submod.parameters()]
    with pytest.raises(ValueError, match="expected gradients with a finite norm, got (nan|inf) over all stages"):
        optimizer.clip_grad_norm(1.0, stages=dist.group.WORLD, error_if_nonfinite=True)
    assert all(torch.equal(a, b) for a, b in zip(before, stage.submod.parameters(), strict=True))
    optimizer.clip_grad_norm(1.0, stages=dist.group.WORLD)
    optimizer.step()  # as AdamW's would, into the weights
    optimizer.zero_grad()
    with pytest.raises((ValueError, RuntimeError), match="stage 0: forward boundary 0, micro-batch 0.*expected finite"):
        _step(r, schedule, x, y)
        _step(r, schedule, x, y)


def _die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "backward"])
@pytest.mark.on(4, timeout=120, allow_exit={VICTIM: -signal.SIGKILL})
def test_a_stage_that_is_killed_in_a_step_is_named(r, gradients):
    r.init("lowcomm", timeout_s=300)  # longer than the test's: nobody waits for a time-out
    schedule, (stage,) = pipelines.pipeline(r, "1F1B", 4, torch.float32)
    x, y = pipelines._batch()
    _step(r, schedule, x, y)
    before = [p.detach().clone() for p in stage.submod.parameters()]
    if r.rank == VICTIM:
        block = stage.submod.get_submodule(f"blocks.{VICTIM}")
        if gradients:
            block.register_full_backward_hook(_die)
        else:
            block.register_forward_pre_hook(_die)
    with pytest.raises((dist.DistBackendError, RuntimeError)) as failure:
        _step(r, schedule, x, y)
        _step(r, schedule, x, y)  # a rank whose part is over hears of it in its next step
    assert all(torch.equal(a, b) for a, b in zip(before, stage.submod.parameters(), strict=True))
    text = str(failure.value)  # of those further off with the cause of the stage that heard first
    assert text.startswith(f"stage {r.rank}: ") and f"rank {VICTIM} (global {VICTIM})" in text, text
    assert "boundary" in text, text
