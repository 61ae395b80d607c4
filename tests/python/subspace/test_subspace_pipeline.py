"""A constrained decoder in stages on real ranks: with the wire and without it, gradients and training are the same."""

import pytest
import stages_case
import subspace_case as case
import torch
import torch.distributed as dist
from torch import nn

import torch_lowcomm as lc
from torch_lowcomm.subspace.basis import Basis

MICRO = 4


def pipeline(r, name, layers, dtype, wrap=lambda part: part, constraint=None, **options):
    """(schedule, this rank's stages) of a constrained GPT under a schedule of torch."""
    kind, per_rank = stages_case.SCHEDULES[name]
    model = lc.subspace.constrain(case.gpt(dtype, layers=layers), **{"rank": case.RANK, **(constraint or {})})
    count = r.size * per_rank
    stages = [
        lc.pipeline.Stage(wrap(lc.subspace.cut(model, i, count, **options)), i, count, torch.device("cpu"))
        for i in stages_case.indices(r.rank, r.size, name)
    ]
    return kind(stages if per_rank > 1 else stages[0], MICRO, loss_fn=case.loss), stages


def _batch(step=0, rows=2 * MICRO):
    text = case.ids(batch=rows, time=case.TIME + 1, seed=step)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def train(steps, schedule, optimizer, group=None):
    """Steps of all stages, with clipping."""
    for step in steps:
        x, y = _batch(step)
        optimizer.zero_grad()
        lc.pipeline.step(schedule, x, target=y, ids=x)
        optimizer.clip_grad_norm(1.0, stages=group or dist.group.WORLD)
        optimizer.step()


def _whole(layers, dtype):
    """The gradients of the decoder in one piece, micro-batch by micro-batch as a schedule adds them."""
    model = lc.subspace.constrain(case.gpt(dtype, layers=layers), case.RANK)
    x, y = _batch()
    for part, target in zip(x.chunk(MICRO), y.chunk(MICRO), strict=True):
        (model(part, target) / MICRO).backward()
    return case.gradients(model)


@pytest.mark.parametrize(
    ("name", "dtype", "bound"),
    [pytest.param(*p.values, torch.float64, 1e-12, marks=p.marks) for p in stages_case.NAMES]
    + [("1F1B", torch.float32, 1e-5)],
)
@pytest.mark.on("pair", group={})
def test_every_schedule_has_one_models_gradients(r, name, dtype, bound):
    schedule, stages = pipeline(r, name, 4, dtype)
    want = _whole(4, dtype)
    x, y = _batch()
    first, last = any(s.is_first for s in stages), any(s.is_last for s in stages)
    for _ in range(2):
        for stage in stages:
            stage.submod.zero_grad()
        schedule.step(*((x,) if first else ()), ids=x, **({"target": y} if last else {}))
        for stage in stages:
            stage.finish()
            for parameter, gradient in case.gradients(stage.submod).items():
                off = case.apart(gradient, want[parameter])
                assert off < bound, (parameter, off)


@pytest.mark.parametrize(("coefficients", "bytes_a_token"), [("fp32", 4 * case.RANK), ("bf16", 2 * case.RANK)])
@pytest.mark.on("pair", group={})
def test_the_payload_is_k_numbers_a_token(r, coefficients, bytes_a_token):
    schedule, _ = pipeline(r, "GPipe", 2, torch.float32, coefficients=coefficients)
    x, y = _batch()
    lc.pipeline.step(schedule, x, target=y, ids=x)
    lc.reset_stats()
    lc.pipeline.step(schedule, x, target=y, ids=x)
    group = next(iter(lc.stats().values()))
    sent = group[f"send {('forward', 'backward')[r.rank]} boundary 0"]
    assert sent["calls"] == sent["exact_calls"] == MICRO
    assert sent["wire_bytes"] - 64 * sent["calls"] == x.numel() * bytes_a_token


OTHERS = {  # option of a stage, and what is named
    "sigma": "boundary",
    "free_blocks": "free_blocks",
    "rank": "coefficients",
    "": "basis",
}


@pytest.mark.parametrize("option", OTHERS)
@pytest.mark.on("pair", group={})
def test_stages_that_differ_stop_with_both_values(r, option):
    schedule, (stage,) = pipeline(r, "1F1B", 4, torch.float32, constraint={option: 1 + r.rank} if option else {})
    x, y = _batch()
    if not option:
        lc.pipeline.step(schedule, x, target=y, ids=x)
    if r.rank == 1 and not option:
        stage.submod.subspace_basis.vectors.copy_(Basis(case.WIDTH, case.RANK, seed=9).vectors)
    said = f"{OTHERS[option]}: expected the same (as at the stage before|on both sides)"
    with pytest.raises((ValueError, RuntimeError), match=said):
        lc.pipeline.step(schedule, x, target=y, ids=x)
        lc.pipeline.step(schedule, x, target=y, ids=x)  # of a rank whose part of the first one was over


@pytest.mark.on("pair", group={})
def test_a_stage_in_ddp(r):
    """A stage in torch's DDP has its module's codec and context, and trains."""
    alone = [dist.new_group([rank]) for rank in range(r.size)][r.rank]

    def wrap(part):
        return nn.parallel.DistributedDataParallel(part, process_group=alone)

    schedule, (stage,) = pipeline(r, "1F1B", 2, torch.float32, wrap, coefficients="minmax8:bucket=64")
    x, y = _batch()
    lc.pipeline.step(schedule, x, target=y, ids=x)
    group = next(iter(lc.stats().values()))
    assert group[f"send {('forward', 'backward')[r.rank]} boundary 0"]["exact_calls"] == 0
    assert ("send context of boundary 0" in group) == (r.rank == 0), group.keys()
    assert all(p.grad is not None for p in stage.submod.parameters())


@pytest.mark.parametrize("given", [{"forward": "gauss4"}, {"backward": "gauss4"}, {"backward": "none"}], ids=str)
@pytest.mark.on("pair", group={})
def test_coefficients_of_a_cut_are_for_what_the_stage_is_not_given(r, given):
    """The other way keeps the cut's codec; "none" is exact."""
    model = lc.subspace.constrain(case.gpt(torch.float32), case.RANK)
    part = lc.subspace.cut(model, r.rank, r.size, coefficients="minmax8:bucket=64")
    stage = lc.pipeline.Stage(part, r.rank, r.size, torch.device("cpu"), **given)
    x, y = _batch()
    lc.pipeline.step(lc.pipeline.Schedule1F1B(stage, MICRO, loss_fn=case.loss), x, target=y, ids=x)
    way = ("forward", "backward")[r.rank]
    exact = lc.stats()[dist.group.WORLD.group_name][f"send {way} boundary 0"]["exact_calls"]
    assert exact == (MICRO if given.get(way) == "none" else 0)
