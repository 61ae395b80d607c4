"""The counter of the random draws of quantized FSDP2: no two share them, and a resumed run goes on with them."""

import pytest
import torch
from fsdp_model import batch, expect_resumed, loss_of, make_model, steps
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_lowcomm as lc

CODECS = {"weights": "qsgd4:bucket=256", "gradients": "qsgd4:bucket=256"}


def _make(r):
    model = make_model(mesh=init_device_mesh("cpu", (r.size,)))
    comms = lc.fsdp.quantize(model, **CODECS)
    return model, comms, torch.optim.AdamW(model.parameters(), lr=3e-3)


@pytest.mark.parametrize("order", ["comms first", "comms last"])
def test_a_resumed_run_draws_as_the_unbroken_one(r, order):
    """Stochastic weights and gradients: the resumed run's losses are those of the run without a break."""
    losses = expect_resumed(r, lambda: _make(r), comms_first=order == "comms first")
    assert len(set(losses)) == 6


def test_counters(r):
    r.init("lowcomm")
    model, comms, optimizer = _make(r)
    with pytest.raises(ValueError, match=r"expected the counters of 2 wrapped modules, got \['weights.0'\]"):
        comms.load_state_dict({"weights.0": 1})
    before = comms.state_dict()
    loss_of(model, batch(r.rank, 0)).backward()
    loss_of(model, batch(r.rank, 1)).backward()
    accumulated = comms.state_dict()
    weights = [key for key in before if key.startswith("weights")]
    assert all(accumulated[key] == before[key] for key in weights)
    coded = [key for key in before if key.startswith("gradients") and accumulated[key] == before[key] + 2]
    assert len(coded) == 2
    get_state_dict(model, optimizer)  # a step at learning rate 0
    assert comms.state_dict() == accumulated
    optimizer.step()
    stepped = comms.state_dict()
    assert sum(stepped[key] == accumulated[key] + 1 for key in weights) == 2
    assert comms.state_dict() == stepped
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)  # an optimizer that is not torch's
    written = comms.state_dict()
    assert sum(written[key] == stepped[key] + 1 for key in weights) == 2


@pytest.mark.on("pair", "quad")
def test_no_two_segments_share_a_slot(r):
    """A group of many parameters, one of few, a second model: no two segments draw alike."""
    r.init("lowcomm")
    taken = []
    for layers in (20, 3):
        model = nn.Sequential(nn.Sequential(*[nn.Linear(64, 64) for _ in range(layers)]), nn.Linear(64, 64))
        for part in model:
            fully_shard(part, mesh=init_device_mesh("cpu", (r.size,)))
        comms = lc.fsdp.quantize(model, **CODECS)
        taken += [(g._slot, len(g.levels.layout)) for g in comms._gathers]
        taken += [(g._slot, len(g.levels.layout) * r.size) for g in comms._reductions]
    slots = [slot for first, count in taken for slot in range(first, first + count)]
    assert len(set(slots)) == len(slots)
    assert min(slots) >= 2**32, "those below are of ops under a policy"


class _OwnRate(torch.optim.Optimizer):
    """An optimizer without a learning rate of its own, as those that find one."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": None})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=-0.05)


def test_optimizers_without_a_rate(r):
    r.init("lowcomm")
    model, comms, _ = _make(r)
    other = nn.Linear(4, 4)
    other(torch.ones(1, 4)).sum().backward()
    before = comms.state_dict()
    _OwnRate(other.parameters()).step()
    assert comms.state_dict() == before, "another model's steps count nothing"
    losses = steps(r, model, _OwnRate(model.parameters()), range(3))
    assert len(set(losses)) == 3 and comms.state_dict() != before
