"""lc.DiLoCoX when something breaks on the way: named on every rank, nothing half-applied, and a way on."""

import os
import signal

import ddp_model
import diloco_model
import pytest
import ranks
import torch
import torch.distributed as dist

import torch_lowcomm as lc

NEVER_S = 600.0  # longer than the harness waits: who is gone is found out at once
EVERY = diloco_model.EVERY
STATE = (".outer", ".momentum", ".residual", ".factor")


def _state(optimizer):
    """The outer loop's tensors that an outer step changes."""
    return {name: t.clone() for name, t in optimizer._outer.state().items() if name.endswith(STATE)}


def _outer(model, optimizer):
    with optimizer.outer_parameters():
        return ddp_model.weights(model)


def _not_finite(r, mode, options, value):
    r.init()
    model, optimizer = diloco_model.fresh(mode=mode, **options)
    diloco_model.train(model, optimizer, r.rank, range(2 * EVERY + 1))
    before = _state(optimizer)
    if r.rank == 1:
        with torch.no_grad():
            model.up.weight[3, 4] = value
    with pytest.raises(ValueError) as caught:
        diloco_model.train(model, optimizer, r.rank, range(2 * EVERY + 1, 4 * EVERY + 1))
    after = _state(optimizer)
    if mode == "sync":
        assert not diloco_model.differing(after, before)
    assert all(tensor.isfinite().all() for tensor in after.values() if tensor.is_floating_point())
    # The way on: what was last agreed on, and moments without a NaN.
    optimizer.restore()
    assert not diloco_model.differing(ddp_model.weights(model), _outer(model, optimizer))
    assert all(w.isfinite().all() for w in ddp_model.weights(model).values())
    optimizer.zero_grad()
    if r.rank == 1:
        optimizer.inner.state.clear()
        model.norm.reset_running_stats()
    begun = optimizer.report["outer_steps"]
    losses = ddp_model.train(model, r.rank, 5 * EVERY, first=50, optimizer=optimizer, spare=True)
    assert all(loss == loss for loss in losses)
    assert optimizer.report["outer_steps"] >= begun + 4
    optimizer.finish()
    return str(caught.value), ddp_model.weights(model)


@pytest.mark.parametrize("mode", ["sync", "continue"])
@pytest.mark.parametrize(
    ("options", "value"),
    [({"codec": None}, float("inf")), ({"codec": "sym4:bucket=64", "rank": 4}, float("nan"))],
    ids=["exact", "low rank"],
)
def test_what_is_not_finite_is_dropped_everywhere(pair, mode, options, value):
    both = pair(_not_finite, mode, options, value)
    for rank, (said, weights) in enumerate(both):
        assert "expected finite pseudo-gradients, got NaN or infinity" in said
        assert ("on this rank" if rank == 1 else "on another rank") in said
        assert not diloco_model.differing(weights, both[0][1])


def _restores(r, mode, dtype):
    """`restore` while an average is under way, and no training after it: it ends at the next outer parameters."""
    r.init()
    torch.manual_seed(7)
    model = ddp_model.Net().to(dtype)
    inner = torch.optim.SGD(model.parameters(), lr=1e-2)
    optimizer = lc.DiLoCoX(inner, EVERY, model=model, mode=mode, outer_momentum=0.6)
    for step in range(2 * EVERY + 2):
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + r.rank + step)
        optimizer.step()
    optimizer.restore()
    assert not diloco_model.differing(ddp_model.weights(model), _outer(model, optimizer))
    optimizer.zero_grad()
    for _ in range(EVERY):
        optimizer.step()
    outer = _outer(model, optimizer)
    assert not diloco_model.differing(ddp_model.weights(model), outer)
    return outer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["continue", "restart"])
def test_restoring_while_an_average_is_under_way(pair, mode, dtype):
    first, second = pair(_restores, mode, dtype)
    assert not diloco_model.differing(first, second)


def _dies(r, mode):
    """The last rank is killed between two outer steps."""
    r.init(timeout_s=NEVER_S)
    model, optimizer = diloco_model.fresh(mode=mode, codec="sym4:bucket=64", rank=4)
    diloco_model.train(model, optimizer, r.rank, range(2 * EVERY + 1))
    before = _state(optimizer)  # which waits for what is under way: it has come on all ranks
    dist.barrier()
    if r.rank == r.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError) as caught:
        diloco_model.train(model, optimizer, r.rank, range(2 * EVERY + 1, 5 * EVERY))
    after = _state(optimizer)
    if mode == "sync":
        assert not diloco_model.differing(after, before)
    optimizer.restore()
    outer = _outer(model, optimizer)
    assert not diloco_model.differing(ddp_model.weights(model), outer)
    # Training by itself goes on up to the next outer step, which says again what is wrong.
    with pytest.raises(dist.DistBackendError):
        diloco_model.train(model, optimizer, r.rank, range(50, 50 + 2 * EVERY))
    with pytest.raises(dist.DistBackendError):
        diloco_model.train(model, optimizer, r.rank, range(50, 50 + 2 * EVERY))
    optimizer.restore()
    assert not diloco_model.differing(ddp_model.weights(model), outer)
    return str(caught.value), outer


@pytest.mark.parametrize("mode", ["sync", "continue"])
def test_survivors_of_a_killed_rank_are_told(mode):
    survivors = ranks.run_ranks(_dies, 3, mode, allow_exit={2: -signal.SIGKILL})[:2]
    for said, outer in survivors:
        assert "outer_step" in said and "rank 2" in said, said
        assert not diloco_model.differing(outer, survivors[0][1])
