"""A plan that is applied: real ranks train in each way, ranks agree on one, and another model or world is refused."""

import pytest
import torch
import torch.distributed as dist
from kept_log import kept_log
from test_planner import Decoder, link
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import torch_lowcomm as lc
from torch_lowcomm.planner import apply

WAYS = {
    "exact DDP": "ddp",
    "DDP, 4 bits": "ddp",
    "exact FSDP2": "fsdp",
    "FSDP2, W8G8": "fsdp",
    "DiLoCo, every 20": "diloco",
}


def planned(r, model, **options):
    batch = (torch.randn(8, 32), torch.randn(8, 32))
    return lc.plan(model, batch, link=link(sites=r.size, **options)), batch


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.on("pair", group={})
def test_every_way_trains(r, name):
    apply._STEPS = 10
    torch.manual_seed(1)
    model = Decoder()
    plan, batch = planned(r, model)
    optimizer = None if WAYS[name] == "fsdp" else torch.optim.AdamW(model.parameters(), lr=1e-2)
    given = name if r.rank == 0 else "exact DDP"  # rank 0's holds
    model, stepped = plan.apply(model, optimizer, way=given)
    losses = []
    with kept_log() as messages:
        for _ in range(24):
            value = model(*batch)
            value.backward()
            stepped.step()
            stepped.zero_grad()
            losses.append(value.item())
    assert losses[-1] < losses[0]
    assert isinstance(model, DistributedDataParallel) == (WAYS[name] == "ddp")
    assert isinstance(next(model.parameters()), DTensor) == (WAYS[name] == "fsdp")
    assert isinstance(stepped, lc.DiLoCoX) == (WAYS[name] == "diloco")
    compared = [text for text in messages if text.startswith("plan: a step takes")]
    assert len(compared) == (r.rank == 0), messages


@pytest.mark.on("pair", group={})
def test_what_is_refused(r):
    model = Decoder()
    plan, _ = planned(r, model)
    with pytest.raises(ValueError, match="expected the planned model of 3360 parameters on 2 ranks, got 12864"):
        plan.apply(Decoder(64), way="exact DDP")
    other, _ = planned(r, model, ranks_per_site=2)
    with pytest.raises(ValueError, match="on 4 ranks, got 3360 parameters on 2"):
        other.apply(model, way="exact DDP")
    with pytest.raises(ValueError, match="way: expected one of exact DDP, .* got 'DDP, 5 bits'"):
        plan.apply(model, way="DDP, 5 bits")
    with pytest.raises(ValueError, match=r"needs no stages, got 'pipeline, 4 bits'; paste:\nstage = lc.pipeline.Stage"):
        plan.apply(model, way="pipeline, 4 bits")
    with pytest.raises(ValueError, match="expected no optimizer for FSDP2"):
        plan.apply(model, torch.optim.SGD(model.parameters(), lr=0.1), way="exact FSDP2")
    dist.barrier()
