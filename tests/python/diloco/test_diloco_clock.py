"""lc.DiLoCoX(sync_seconds=): intervals by the clock, for sites of different speed, whose parts count by their samples."""

import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torch_lowcomm as lc

LIMIT, SECONDS, INTERVALS = 10_000, 0.4, 4


def _trained(r, mode, options):
    """Site 1 is slower by half. Returns (outer steps, inner steps, [(outer parameters, weighted mean of the sites')])."""
    r.init()
    mesh = init_device_mesh("cpu", (2, r.size // 2), mesh_dim_names=("sites", "replicas"))
    site, _ = mesh.get_coordinate()
    torch.manual_seed(0)
    model = nn.Linear(40, 30)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    opt = lc.DiLoCoX(inner, LIMIT, sync_seconds=SECONDS, mode=mode, mesh=mesh, model=model, **options)
    steps, since, notes = 0, 0, []
    while opt.report["outer_steps"] < INTERVALS:
        begun = opt.report["outer_steps"]
        model.weight.grad = torch.full_like(model.weight, 1.0 + site)
        model.bias.grad = torch.full_like(model.bias, -1.0)
        time.sleep(0.01 * (1 + site))
        mine = model.weight.detach() - 0.01 * model.weight.grad  # where this inner step leads
        opt.step(samples=3 - site)
        steps, since = steps + 1, since + 3 - site
        if opt.report["outer_steps"] > begun:
            if mode == "sync":
                all_of = [None] * r.size
                dist.all_gather_object(all_of, (since, mine))
                places = all_of[:: r.size // 2]
                total = sum(weight for weight, _ in places)
                mean = sum(weight * theta for weight, theta in places) / total
                notes.append((model.weight.detach().clone(), mean))
            since = 0
    outer_steps = opt.report["outer_steps"]
    opt.finish()
    return outer_steps, steps, notes, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("ranks_a_site", [1, 2])
def test_an_average_is_weighted_by_samples(pair, quad, ranks_a_site):
    options = {"codec": None, "outer_lr": 1.0, "outer_momentum": 0.0}
    found = (pair if ranks_a_site == 1 else quad)(_trained, "sync", options)
    for outer_steps, _, notes, ended in found:
        assert outer_steps == INTERVALS and len(notes) == INTERVALS
        for averaged, mean in notes:
            assert torch.allclose(averaged, mean, atol=1e-6)
        assert all(torch.equal(a, b) for a, b in zip(ended, found[0][3], strict=True))
    for site in (found[:ranks_a_site], found[ranks_a_site:]):
        assert len({steps for _, steps, *_ in site}) == 1, "the ranks of a site end it at the same step"


@pytest.mark.parametrize(
    "options",
    [
        {"codec": "sym4:bucket=64"},
        {"codec": "gauss2", "fragments": 2},
        {"codec": "sym4:bucket=64", "rank": 4, "adapt_rank": True},
    ],
    ids=str,
)
@pytest.mark.on("quad", alike=True)
def test_delayed_averages_agree(r, options):
    outer_steps, _, _, ended = _trained(r, "continue", options)
    assert outer_steps >= INTERVALS
    return outer_steps, ended


@pytest.mark.on("pair", group={"timeout_s": 20})
def test_a_slow_site_makes_one_outer_step_after_an_inner_step(r):
    """An inner step of site 1 takes longer than an interval of two fragments; five outer steps end in one of the first."""
    torch.manual_seed(0)
    model = nn.Linear(40, 30)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    opt = lc.DiLoCoX(inner, LIMIT, sync_seconds=0.2, mode="sync", fragments=2, model=model)
    steps = []
    while opt.report["outer_steps"] < 5:
        time.sleep(0.3 * r.rank + 0.01)
        opt.step()
        steps.append(opt.report["outer_steps"])
    opt.finish()
    assert sorted(set(steps) | {0}) == [0, 1, 2, 3, 4, 5]


@pytest.mark.on("pair", group={"timeout_s": 20})
def test_samples_of_a_dropped_step_count_in_the_next(r):
    """The first interval of 4 steps, by their number, is spoilt: its samples count with those of the second."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"codec": None, "outer_lr": 1.0, "outer_momentum": 0.0}
    opt = lc.DiLoCoX(inner, 4, sync_seconds=1000.0, mode="sync", **options)
    start = model.weight.detach().clone()
    for step in range(8):
        model.weight.grad = torch.full_like(model.weight, 1.0 + r.rank)
        model.bias.grad = torch.zeros_like(model.bias)
        kept = model.weight.detach() - 0.1 * model.weight.grad
        if step == 3 and r.rank == 0:
            model.weight.grad[1, 2] = float("nan")
        samples = 1 + 2 * r.rank if step < 4 else 3 - 2 * r.rank
        if step == 3:
            with pytest.raises(ValueError, match="finite"):
                opt.step(samples=samples)
            with torch.no_grad():
                model.weight.copy_(kept)
        else:
            opt.step(samples=samples)
    moved = (model.weight.detach() - start).mean().item()
    assert moved == pytest.approx(-0.8 * 1.5), "16 samples of each site: equal parts"
    opt.finish()


@pytest.mark.on("pair", group={"timeout_s": 20})
def test_sites_of_different_speed_share_a_checkpoint(r):
    """Sites of different speed save one checkpoint and load it: each goes on with its own inner steps."""
    torch.manual_seed(0)
    model = nn.Linear(40, 30)

    def loop():
        inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        return lc.DiLoCoX(inner, LIMIT, sync_seconds=0.3, mode="sync", model=model)

    def train(opt, outer_steps):
        while opt.report["outer_steps"] < outer_steps:
            time.sleep(0.01 * (1 + 2 * r.rank))
            model(torch.ones(3, 40)).sum().backward()
            opt.step()
            opt.zero_grad()

    opt = loop()
    train(opt, 2)
    saved = [None] * 2
    dist.all_gather_object(saved, opt.steps)
    assert saved[0] > saved[1]
    dcp.save({"loop": opt}, checkpoint_id=r.path("dcp"))
    opt.finish()
    opt = loop()
    dcp.load({"loop": opt}, checkpoint_id=r.path("dcp"))
    assert (opt.steps, opt.report["outer_steps"]) == (saved[r.rank], 2)
    train(opt, 4)
    opt.finish()


@pytest.mark.on("pair", group={})
def test_what_a_clock_cannot_be_is_refused(r):
    model = nn.Linear(4, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    coded = {"codec": "sym4:bucket=64", "rank": 1}
    with pytest.raises(TypeError, match="sync_every: expected an integer, got none"):
        lc.DiLoCoX(inner)
    for sync_every, options, said in [
        ((), {"sync_seconds": 1.0}, "sync_seconds: expected sync_every too, the most inner steps of an interval"),
        ((5,), {"sync_seconds": 0.0}, "sync_seconds: expected a number above 0, or None, got 0.0"),
        ((5,), {"sync_seconds": float("inf")}, "sync_seconds: expected a number above 0, or None, got inf"),
        ((5,), {"sync_seconds": 1.0, "adapt_sync_every": True, **coded}, "sync_seconds: expected none with an adaptive"),
        ((5,), {"sync_seconds": 1.0, "fragments": 2, "fragment_sync_delay": 2, "mode": "restart"},
         "fragment_sync_delay: expected none with sync_seconds and several fragments"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=said):
            lc.DiLoCoX(inner, *sync_every, **options)
    with pytest.raises((ValueError, dist.DistBackendError), match="sync_every too, the most inner steps"):
        lc.DiLoCoX(inner, *([5] if r.rank else []), sync_seconds=1.0)  # the other rank is told
    opt = lc.DiLoCoX(inner, 5, sync_seconds=1.0)
    with pytest.raises(ValueError, match="samples: expected a number above 0, got 0"):
        opt.step(samples=0)
    opt.finish()
    with pytest.raises((ValueError, dist.DistBackendError), match="sync_seconds differs: .*'[12]'.*'[12]'"):
        lc.DiLoCoX(inner, 5, sync_seconds=1.0 + r.rank)


@pytest.mark.on("quad", group={})
def test_ranks_of_a_site_that_count_otherwise_are_named(r):
    """One rank of each site counts its own batch, the other the whole site's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sites", "replicas"))
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = lc.DiLoCoX(inner, 4, sync_seconds=60.0, mesh=mesh, model=model)
    said = "samples: expected the same number on all ranks of a site, that of the whole site, got 8 of rank 0 and 4 of rank 1"
    with pytest.raises(ValueError, match=said):
        for _ in range(4):
            opt.step(samples=8 if mesh.get_coordinate()[1] == 0 else 4)
    assert opt.report["outer_steps"] == 0
    dist.barrier()
