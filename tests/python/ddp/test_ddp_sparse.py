"""lc.ddp.hook and sparse gradients: averaged exactly, as DDP without a hook does, and said in the log."""

import torch
from kept_log import kept_log
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_lowcomm as lc

ROWS, WIDTH = 200, 64


def _gradients(r, state, poisoned=False):
    torch.manual_seed(3)
    inner = nn.Sequential(nn.Embedding(ROWS, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH, bias=False))
    model = DistributedDataParallel(inner)
    if state:
        state = lc.ddp.State(codec="sym8:bucket=128", model=inner)
        model.register_comm_hook(state, lc.ddp.hook)
    loss = model(torch.arange(9) + 4 * r.rank).square().sum()
    (loss * float("nan") if poisoned else loss).backward()
    return state, *(parameter.grad for parameter in inner.parameters())


def test_sparse_gradients_are_averaged_exactly(r):
    r.init()
    _, sparse, dense = _gradients(r, False)
    state, coded_sparse, coded_dense = _gradients(r, True)
    assert coded_sparse.is_sparse and torch.equal(coded_sparse.to_dense(), sparse.to_dense())
    assert not torch.equal(coded_dense, dense), "the dense gradient travels in codes"
    torch.testing.assert_close(coded_dense, dense, rtol=0, atol=0.02 * dense.abs().max().item())
    assert state.state_dict()[f"rank{r.rank}.1.weight.residual"].any()
    _, poisoned, _ = _gradients(r, True, poisoned=True)
    assert poisoned.to_dense().isnan().any()


def test_the_log_names_them(r):
    r.init()
    with kept_log() as lines:
        _gradients(r, True)
    (line,) = [line for line in lines if "travel by" in line]
    assert "1 parameters (4096 elements)" in line and "1 exact, for their gradients are sparse: 0.weight" in line
