"""A plan that is applied: real ranks train in each way, ranks agree on one, and another model or world is refused."""

import pytest
import torch
import torch.distributed as dist
from kept_log import kept_log
from test_planner import Decoder, link
from torch.distributed.fsdp import fully_shard
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    given = name if r.rank == 0 else "exact DDP"  # rank 0's holds
    model, stepped = plan.apply(model, optimizer, way=given)
    losses = []
    with kept_log() as messages:
        for _ in range(84 if WAYS[name] == "diloco" else 24):  # twice two outer steps, and more
            value = model(*batch)
            value.backward()
            stepped.step()
            stepped.zero_grad()
            losses.append(value.item())
    assert losses[-1] < losses[0]
    assert isinstance(model, DistributedDataParallel) == (WAYS[name] == "ddp")
    assert isinstance(next(model.parameters()), DTensor) == (WAYS[name] == "fsdp")
    assert isinstance(stepped, lc.DiLoCoX) == (WAYS[name] == "diloco")
    assert stepped.param_groups[0]["lr"] == 1e-2
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
    tuned = lc.plan(model, (torch.randn(8, 32), torch.randn(8, 32)), link=link(), fine_tuning=True)
    with pytest.raises(ValueError, match=r"FSDP2 or DiLoCo, got 'seed replay'; paste:\noptimizer = lc.SeedReplay"):
        tuned.apply(model, way="seed replay")
    several = torch.optim.SGD([{"params": model.blocks.parameters()}, {"params": []}], lr=0.1)
    with pytest.raises(ValueError, match="FSDP2: expected an optimizer of one group and without a step"):
        plan.apply(model, several, way="exact FSDP2")
    wrapped, _ = plan.apply(model, way="exact DDP")
    with pytest.raises(ValueError, match="expected the model by itself, got one under DDP or FSDP2"):
        plan.apply(wrapped, way="exact DDP")
    with pytest.raises(ValueError, match="rank 1: plan: way: expected one of"):
        plan.apply(model, way="exact DDP" if r.rank == 0 else "nothing")
    dist.barrier()


@pytest.mark.on("pair", group={})
def test_a_parameter_without_a_gradient(r):
    model = Decoder()
    model.spare = torch.nn.Parameter(torch.zeros(3))
    plan, batch = planned(r, model)
    model, optimizer = plan.apply(model, way="DDP, 4 bits")
    for _ in range(3):  # DDP by itself fails in the second step
        model(*batch).backward()
        optimizer.step()


@pytest.mark.on("quad", group={})
def test_sites_of_two_ranks_are_sites(r):
    """Two sites of two ranks, under DDP inside: a site's message is that of its two ranks together."""
    torch.manual_seed(1)
    model = Decoder()
    batch = (torch.randn(8, 32), torch.randn(8, 32))
    plan = lc.plan(model, batch, link=link(sites=2, ranks_per_site=2))
    model, optimizer = plan.apply(model, torch.optim.SGD(model.parameters(), lr=1e-2), way="DiLoCo, every 20")
    for _ in range(20):
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.report["outer_steps"] == 1 and len(optimizer.report["stripe_elements"]) == 2
    (chosen,) = [way for way in plan.ways if way.name == "DiLoCo, every 20"]
    sent = torch.tensor([float(optimizer.report["total_sent_bytes"])])
    dist.all_reduce(sent)
    assert sent.item() == pytest.approx(2 * 20 * chosen.sent, rel=0.1)  # of two sites; small messages have frames


@pytest.mark.parametrize("name", [*WAYS, "DDP, rank 4"])
@pytest.mark.on("pair", group={})
def test_pasted_lines_train(r, name):
    """As they stand, with the names that they need and the optimizer that FSDP2 wants afterwards."""
    torch.manual_seed(1)
    model = Decoder()
    plan, batch = planned(r, model)
    (lines,) = [way.lines for way in plan.ways if way.name == name]
    names = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "lc": lc, "fully_shard": fully_shard}
    exec(lines, names | {"DistributedDataParallel": DistributedDataParallel}, names)
    model, optimizer = names["model"], names["optimizer"]
    if "fully_shard" in lines:
        optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
