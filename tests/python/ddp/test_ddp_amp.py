"""lc.ddp next to a gradient scaler: what is not finite reaches every rank, and changes nothing but the scale."""

import ddp_model
import pytest
import torch
from diloco_model import differing

import torch_lowcomm as lc

BAD = 3  # the step whose gradient is spoilt


def _spoil(model, name, value):
    """In the next backward, before DDP sees the gradient."""
    p = dict(model.module.named_parameters())[name]

    def write(gradient):
        handle.remove()
        gradient = gradient.clone()
        gradient.view(-1)[5] = value
        return gradient

    handle = p.register_hook(write)


def _snapshot(state):
    return {k: v.clone() for k, v in state.state_dict().items() if isinstance(v, torch.Tensor)}


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("where", ["up.weight", "down.weight", "norm.weight"])
@pytest.mark.parametrize(
    "options", [{"codec": "sym4"}, {"codec": "sym4", "rank": 4}, {"codec": "gauss4", "residual_dtype": "int8"}], ids=str
)
@pytest.mark.on("trio", group={}, alike=True)
def test_a_bad_gradient_skips_the_step_everywhere(r, options, where, value):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    state = lc.ddp.State(grad_scaler=scaler, **options)
    model = ddp_model.make(state, bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    skipped = []
    for step in range(6):
        before, weights = _snapshot(state), ddp_model.weights(model)
        if step == BAD and r.rank == 1:
            _spoil(model, where, value)
        optimizer.zero_grad()
        scaler.scale(ddp_model.loss_of(model, r.rank, step, spare=True)).backward()
        scaler.step(optimizer)
        scaler.update()
        after = ddp_model.weights(model)
        skipped.append(all(torch.equal(weights[n], after[n]) for n in weights))
        if step > 0:
            assert bool(differing(before, _snapshot(state))) == (step != BAD)
        assert all(v.float().isfinite().all() for v in _snapshot(state).values())
    assert skipped == [step == BAD for step in range(6)]
    assert scaler.get_scale() == 512.0
    return list(ddp_model.weights(model).values())


def _trained(r, scaled):
    """Weights, state and scale after the same training with a scale that falls twice, and without one."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=scaled)
    state = lc.ddp.State(codec="sym4:bucket=128", rank=4, grad_scaler=scaler if scaled else None)
    model = ddp_model.make(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(ddp_model.loss_of(model, r.rank, step, spare=True)).backward()
        scaler.step(optimizer)
        scaler.update(2.0 ** (12 - 3 * (step // 2)) if scaled else None)
    return ddp_model.weights(model), _snapshot(state), scaler.get_scale()


@pytest.mark.on("pair", group={})
def test_residuals_follow_the_scale(r):
    (weights, kept, scale), (expected, unscaled, _) = _trained(r, True), _trained(r, False)
    assert not differing(weights, expected), "powers of two change no bit"
    # The last update's scale is not yet followed: residuals are in the unit of the last backward.
    for name, value in kept.items():
        assert torch.equal(value, unscaled[name] * (scale if name.endswith("residual") else 1.0)), name
