"""lc.pipeline.Schedule1F1B: the gradients of torch's schedules, and forwards and backwards in the order that it promises."""

import pytest
import stages_case as case
import torch
from torch.distributed import pipelining

import torch_lowcomm as lc

MICRO = 8


def _stage(r, **options):
    return lc.pipeline.Stage(case.module(r.rank), r.rank, r.size, torch.device("cpu"), **options)


def _recorded(stage):
    """The stage's computations from now on: (F or B, micro-batch)."""
    calls = []
    forward, backward = stage.forward_one_chunk, stage.backward_one_chunk

    def record_forward(chunk, *args, **kwargs):
        calls.append(("F", chunk))
        return forward(chunk, *args, **kwargs)

    def record_backward(chunk, *args, **kwargs):
        calls.append(("B", chunk))
        return backward(chunk, *args, **kwargs)

    stage.forward_one_chunk, stage.backward_one_chunk = record_forward, record_backward
    return calls


def _order(first):
    """`first` forwards, then a backward and a forward in turn."""
    calls = [("F", i) for i in range(first)]
    for i in range(MICRO):
        calls += [("B", i)] + ([("F", first + i)] if first + i < MICRO else [])
    return calls


@pytest.mark.on("pair", group={})
def test_two_stages_have_torchs_gradients_in_another_order(r):
    x, y = case.batch(rows=2 * MICRO)
    expected = None
    kinds = [pipelining.ScheduleGPipe, pipelining.Schedule1F1B] + 4 * [lc.pipeline.Schedule1F1B]
    for kind, ahead in zip(kinds, (None, None, 0, 1, 2, MICRO), strict=True):
        stage = _stage(r)
        options = {} if ahead is None else {"ahead": ahead}
        schedule = kind(stage, MICRO, loss_fn=case.loss, **options)
        calls = _recorded(stage)
        lc.pipeline.step(schedule, x, target=y)
        if ahead is not None:
            behind = r.size - 1 - r.rank
            assert calls == _order(min(MICRO, 1 + behind + ahead * behind))
        found = case.gradients([stage])
        for mine, torchs in zip(found, expected or found, strict=True):
            assert torch.equal(mine, torchs), f"{kind.__module__}.{kind.__name__} {options}"
        expected = expected or found
        calls.clear()
        result = lc.pipeline.evaluate(schedule, x, target=y)
        assert [name for name, _ in calls if name == "F"] == MICRO * ["F"]
        if r.rank == r.size - 1:
            torch.testing.assert_close(result, case.whole(r.size)(x), rtol=1e-5, atol=1e-6)


@pytest.mark.on("pair", group={})
def test_changes_are_those_of_torchs_schedule(r):
    """Changes do not depend on the order in which forwards and backwards alternate."""
    x, y = case.batch(rows=2 * MICRO)
    found = []
    for kind in (pipelining.Schedule1F1B, lc.pipeline.Schedule1F1B):
        stage = _stage(r, cache=lc.pipeline.Cache(), window=3, **case.CODED)
        schedule = kind(stage, MICRO, loss_fn=case.loss)
        optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            lc.pipeline.step(schedule, x, samples=range(len(x)), target=y)
            optimizer.step()
        found.append(case.gradients([stage]))
    for torchs, mine in zip(*found, strict=True):
        assert torch.equal(mine, torchs)
    # The pool destroys the group, after a barrier: no op here waits for the other rank, which may still connect.


@pytest.mark.on("pair", group={})
def test_mistakes_are_named(r):
    from torch.distributed.pipelining import PipelineStage

    torchs = PipelineStage(case.module(r.rank), r.rank, r.size, torch.device("cpu"))
    with pytest.raises(TypeError, match="expected an lc.pipeline.Stage, got PipelineStage"):
        lc.pipeline.Schedule1F1B(torchs, MICRO)
    with pytest.raises(ValueError, match="ahead: expected 0 or more, got -1"):
        lc.pipeline.Schedule1F1B(_stage(r), MICRO, ahead=-1)
    with pytest.raises(ValueError, match="microbatches"):
        lc.pipeline.Schedule1F1B(_stage(r), 1)
