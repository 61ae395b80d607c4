"""lc.DiLoCoX and gradient scalers: a step that one rank skips is counted by all, for none to wait for ever."""

import ddp_model
import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_lowcomm as lc

BAD, STEPS, EVERY = 4, 12, 3


def _make(seed=7, **inner):
    torch.manual_seed(seed)
    model = ddp_model.Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, **inner)


def _scaled_steps(model, optimizer, rank, unscale, bad=None, steps=STEPS):
    """The scaler's scale, and which steps moved no parameter."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    skipped = []
    for step in range(steps):
        before = ddp_model.weights(model)
        scaler.scale(ddp_model.loss_of(model, rank, step, spare=True)).backward()
        if step == bad:
            model.up.weight.grad[3, 4] = float("inf")
        if unscale:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = ddp_model.weights(model)
        if all(torch.equal(before[name], after[name]) for name in before):
            skipped.append(step)
    return scaler.get_scale(), skipped


@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("inner", [{}, {"fused": True}], ids=["", "fused"])
@pytest.mark.on("pair", group={})
def test_a_scaled_step_is_the_inner_ones(r, unscale, inner):
    """Up to the first outer step, wrapped and not."""
    model, optimizer = _make(**inner)
    plain, alone = _make(**inner)
    wrapped = lc.DiLoCoX(optimizer, 100, model=model)
    bad = BAD if r.rank == 1 else None
    said = _scaled_steps(model, wrapped, r.rank, unscale, bad)
    assert said == _scaled_steps(plain, alone, r.rank, unscale, bad)
    assert said == ((512.0, [BAD]) if r.rank == 1 else (1024.0, []))
    weights = ddp_model.weights(plain)
    assert all(torch.equal(w, weights[name]) for name, w in ddp_model.weights(model).items())


@pytest.mark.parametrize("mode", ["sync", "continue"])
@pytest.mark.on("pair", group={"timeout_s": 20})
def test_a_rank_that_skips_a_step_keeps_up(r, mode):
    """Rank 1 skips a step, rank 0 does not: both have made as many outer steps, and neither waits."""
    model, optimizer = _make()
    wrapped = lc.DiLoCoX(optimizer, EVERY, mode=mode, model=model)
    _scaled_steps(model, wrapped, r.rank, False, BAD if r.rank == 1 else None)
    assert wrapped.report["outer_steps"] == STEPS // EVERY
    wrapped.finish()
    every = [None] * 2
    dist.all_gather_object(every, ddp_model.weights(model))
    assert all(torch.equal(w, every[1][name]) and w.isfinite().all() for name, w in every[0].items())
