"""lc.DiLoCoX when something breaks on the way: named on every rank, nothing half-applied, and a way on."""

import os
import signal

import ddp_model
import diloco_model
import pytest
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["continue", "restart"])
@pytest.mark.on("pair", group={}, alike=True)
def test_restoring_while_an_average_is_under_way(r, mode, dtype):
    """Without training after it, a rank ends at the next outer parameters."""
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
    return [tensor for _, tensor in sorted(outer.items())]


@pytest.mark.parametrize("mode", ["sync", "continue"])
@pytest.mark.on(3, alike=True, allow_exit={2: -signal.SIGKILL})
def test_survivors_of_a_killed_rank_are_told(r, mode):
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
    said = str(caught.value)
    assert "outer_step" in said and "rank 2" in said, said
    return [tensor for _, tensor in sorted(outer.items())]
