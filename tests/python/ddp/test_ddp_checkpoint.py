"""lc.ddp's state saved and resumed: to the bit, or refused by name."""

import ddp_model
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from diloco_model import differing
from torch import nn

import torch_lowcomm as lc
from torch_lowcomm._checksum import checksum

CASES = {
    "coded": {"codec": "sym4:bucket=128"},
    "stochastic": {"codec": "qsgd3:bucket=128", "warm_up_steps": 2},
    "low rank": {"codec": "qsgd4:bucket=64", "rank": 4},
    "8-bit residuals": {"codec": "gauss4", "rank": 3, "residual_dtype": "int8"},
}
SAVED, STEPS = 4, 8


@pytest.mark.parametrize(
    ("case", "named", "how"),
    [*((case, named, "save") for case in CASES for named in (True, False)), ("low rank", True, "dcp")],
)
def test_a_resumed_run_is_the_uninterrupted_one(r, case, named, how):
    """A run goes on from torch.save and from a distributed checkpoint."""
    r.init()

    def fresh():
        torch.manual_seed(7)
        net = ddp_model.Net()
        state = lc.ddp.State(**CASES[case], model=net if named else None)
        model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.01)
        model.register_comm_hook(state, lc.ddp.hook)
        return state, model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    state, model, optimizer = fresh()
    ddp_model.train(model, r.rank, SAVED, optimizer=optimizer, spare=True)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "ddp": state.state_dict()}
    if how == "dcp":
        dcp.save({"ddp": state}, checkpoint_id=r.path("dcp"))
    torch.save(saved, r.path(f"rank{r.rank}.pt"))
    ddp_model.train(model, r.rank, STEPS - SAVED, first=SAVED, optimizer=optimizer, spare=True)
    whole = ddp_model.weights(model), state.state_dict()

    dist.destroy_process_group()
    r.init()
    state, model, optimizer = fresh()
    saved = torch.load(r.path(f"rank{r.rank}.pt"))
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    if how == "dcp":
        dcp.load({"ddp": state}, checkpoint_id=r.path("dcp"))
    else:
        state.load_state_dict(saved["ddp"])
        assert not differing(state.state_dict(), saved["ddp"])
    assert state.steps == SAVED
    # Buckets are those of a first step again, which the uninterrupted run had left behind.
    ddp_model.train(model, r.rank, STEPS - SAVED, first=SAVED, optimizer=optimizer, spare=True)
    assert not differing(ddp_model.weights(model), whole[0])
    assert not differing(state.state_dict(), whole[1])
    assert any(key.startswith(f"rank{r.rank}.") for key in whole[1])
    assert ("rank0.up.weight.residual" in whole[1]) == (named and r.rank == 0)


def test_a_state_is_loaded_after_a_backward_that_broke_off(r):
    """A backward breaks off behind its first buckets, on all ranks; then the state is loaded and trains on."""
    r.init()
    net = ddp_model.Net()
    state = lc.ddp.State(codec="sym4:bucket=128", model=net)
    model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.01)
    model.register_comm_hook(state, lc.ddp.hook)
    ddp_model.train(model, r.rank, 2, spare=True)
    saved = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.state_dict().items()}

    def breaks(*_):
        raise RuntimeError("broken off")

    handle = net.up.register_full_backward_hook(breaks)
    with pytest.raises(RuntimeError, match="broken off"):
        ddp_model.loss_of(model, r.rank, 2, spare=True).backward()
    handle.remove()
    dist.barrier()
    state.load_state_dict(saved)
    assert not differing(state.state_dict(), saved)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"world_size": 4}, ["world_size", "expected 2", "got 4"]),
        ({"rank": 8}, ["rank", "expected 4", "got 8"]),
        ({"error_feedback": False}, ["error_feedback", "expected True", "got False"]),
        ({"residual_dtype": "int8"}, ["residual_dtype", "expected float32", "got int8"]),
        ({"world_size": None}, ["world_size", "expected 2", "got none"]),
        ({"up.weight.factor": None}, ["up.weight.factor", "got none"]),
        ({"up.weight.factor": torch.zeros(3, 48)}, ["up.weight.factor", "(4, 48)", "(3, 48)"]),
    ],
    ids=str,
)
def test_a_state_that_does_not_fit_is_refused(r, changes, said):
    r.init()
    net = ddp_model.Net()
    state = lc.ddp.State(rank=4, model=net)
    before = state.state_dict()
    saved = {**before, "steps": 5} | changes
    saved = {k: v for k, v in saved.items() if v is not None}
    with pytest.raises(ValueError) as caught:
        state.load_state_dict(saved)
    assert not differing(state.state_dict(), before)
    text = str(caught.value)
    assert all(part in text for part in said), text


def test_another_ranks_state_is_refused(r):
    r.init()
    net = ddp_model.Net()
    state = lc.ddp.State(model=net)
    theirs = {k.replace(f"rank{r.rank}.", f"rank{1 - r.rank}."): v for k, v in state.state_dict().items()}
    with pytest.raises(ValueError, match=f"expected 'rank{r.rank}.up.weight.residual' in the loaded state, got none"):
        state.load_state_dict(theirs)


def test_without_names_the_first_backward_finds_it(r):
    """Without names a state that does not fit is found where its parameters are first seen."""
    r.init()
    state = lc.ddp.State()
    model = ddp_model.make(state)
    crc = f"rank{r.rank}.crc"
    other = {k: v for k, v in state.state_dict().items() if k != crc} | {f"rank{r.rank}.0.residual": torch.zeros(5, 5)}
    state.load_state_dict({**other, crc: checksum(other)})
    with pytest.raises(ValueError, match=r"rank\d.0.residual: expected .* of shape \(96, 48\), got .* \(5, 5\)"):
        ddp_model.loss_of(model, r.rank, 0, spare=True).backward()
