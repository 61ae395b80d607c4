"""lc.ddp.State made before the group, pickled and deep-copied: it goes on as the state that it was made of."""

import copy
import io

import ddp_model
import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_lowcomm as lc

CASES = {
    "coded": {"codec": "qsgd4:bucket=128"},
    "low rank": {"codec": "sym4:bucket=128", "rank": 4, "residual_dtype": "int8"},
}
STEPS = 3


def _trained(model, rank, first):
    """A few steps; the weights and what the hook's state then has."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    ddp_model.train(model, rank, STEPS, first=first, optimizer=optimizer, spare=True)
    return ddp_model.weights(model)


def _pickled(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {"deepcopy": copy.deepcopy, "torch.save": _pickled}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_a_copy_goes_on(r, case, way):
    """(network, state) together, as a DDP model holds them: the copy's state is of the copy's parameters."""
    r.init()
    options = CASES[case]
    torch.manual_seed(7)
    net = ddp_model.Net()
    state = lc.ddp.State(**options, model=net)
    model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.01)
    model.register_comm_hook(state, lc.ddp.hook)
    _trained(model, r.rank, 0)
    its_net, its_state = WAYS[way]((net, state))
    assert its_state.steps == state.steps == STEPS
    again = nn.parallel.DistributedDataParallel(its_net, bucket_cap_mb=0.01)
    again.register_comm_hook(its_state, lc.ddp.hook)
    before = state.state_dict()
    for name, value in its_state.state_dict().items():
        same = torch.equal(value, before[name]) if isinstance(value, torch.Tensor) else value == before[name]
        assert same, name
    # Draws have other places than the original's, and so other bits where a codec rounds at random.
    own, its = _trained(model, r.rank, STEPS), _trained(again, r.rank, STEPS)
    for name, weight in own.items():
        torch.testing.assert_close(its[name], weight, rtol=0, atol=0.02 if "qsgd" in options["codec"] else 0)


def _is_not_new(residual):
    """In 8 bits a new one has bytes of 0 and, for an element of 0, 128."""
    return bool(residual.any()) if residual.dtype == torch.float32 else len(residual.unique()) > 2


@pytest.mark.parametrize("case", CASES)
def test_rank_0s_copy_serves_all_ranks(r, case):
    """torch.save on rank 0, loaded on all ranks: they agree, and rank 1 begins with residuals of 0."""
    r.init()
    net = ddp_model.Net()
    state = lc.ddp.State(**CASES[case], model=net)
    model = nn.parallel.DistributedDataParallel(net)
    model.register_comm_hook(state, lc.ddp.hook)
    _trained(model, r.rank, 0)
    if r.rank == 0:
        torch.save((net, state), r.path("copy.pt"))
    dist.barrier()
    net, state = torch.load(r.path("copy.pt"), weights_only=False)
    model = nn.parallel.DistributedDataParallel(net)
    model.register_comm_hook(state, lc.ddp.hook)
    residuals = [value for name, value in state.state_dict().items() if name.endswith(".residual")]
    assert len(residuals) == len(ddp_model.CODED) and any(map(_is_not_new, residuals)) == (r.rank == 0)
    weights = _trained(model, r.rank, STEPS)
    every = [None] * r.size
    dist.all_gather_object(every, weights)
    assert all(torch.equal(every[0][name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("codecs", [("sym4", "sym4"), ("sym4", "sym8")], ids=["alike", "ranks that differ"])
def test_a_state_is_made_before_the_group(r, codecs):
    """Ranks that differ are told at the first step."""
    state = lc.ddp.State(codec=codecs[r.rank])
    with pytest.raises(ValueError, match='call init_process_group\\("lowcomm"\\) first'):
        state.state_dict()
    r.init()
    model = ddp_model.make(state)
    if codecs[0] != codecs[1]:
        with pytest.raises(dist.DistBackendError, match="codec(.|\n)*sym(.|\n)*sym"):
            _trained(model, r.rank, 0)
        return
    _trained(model, r.rank, 0)
    with pytest.raises(ValueError, match="rank: expected 1 or more"):
        lc.ddp.State(rank=0)
