"""lc.DiLoCoX over sites of several ranks where something is wrong or uneven on one rank: the others neither wait nor differ."""

from datetime import timedelta

import ddp_model
import diloco_model
import pytest
import torch
import torch.distributed as dist
from pipeline_model import EVERY, HIDDEN
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torch_lowcomm as lc

TIMEOUT_S = 25


def _by_hand(r, **options):
    """(number of the site, model, loop) of a rank of two sites of two replicas that no wrapper names."""
    mesh = init_device_mesh("cpu", (2, r.size // 2), mesh_dim_names=("sites", "ranks"))
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(ddp_model.WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 7))
    optimizer = lc.DiLoCoX(
        torch.optim.SGD(model.parameters(), lr=0.1),
        EVERY,
        model=model,
        group=mesh.get_group("sites"),
        replicas=mesh.get_group("ranks"),
        **options,
    )
    return mesh.get_coordinate()[0], model, optimizer


def _train(model, optimizer, site, steps, spoilt=False):
    for step in steps:
        x, y = ddp_model.batch(site, step)
        (model(x) - y).square().mean().backward()
        if spoilt:
            for parameter in model.parameters():
                parameter.grad.fill_(float("nan"))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("mode", ["sync", "continue"])
@pytest.mark.on("quad", group={"timeout_s": TIMEOUT_S}, alike=True)
def test_sites_train_on_after_a_step_that_one_replica_has_spoilt(r, mode):
    """One replica has a NaN, which its step or its state_dict meets: the site's other rank drops its part of the step too."""
    site, model, optimizer = _by_hand(r, codec="sym4:bucket=64", mode=mode)
    _train(model, optimizer, site, range(EVERY - 1))
    with pytest.raises((ValueError, dist.DistBackendError), match="expected finite pseudo-gradients"):
        _train(model, optimizer, site, [EVERY - 1], spoilt=r.rank == 1)
        optimizer.state_dict()
    optimizer.restore()
    optimizer.zero_grad()
    _train(model, optimizer, site, range(EVERY, 4 * EVERY))
    assert optimizer.report["outer_steps"] == (3 if mode == "sync" else 4)
    optimizer.finish()
    assert all(p.isfinite().all() for p in model.parameters())
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.on("quad", group={"timeout_s": TIMEOUT_S})
def test_of_replicas_the_first_ones_buffers_are_averaged(r):
    """Each replica has running means and variances of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sites", "replicas"))
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = lc.DiLoCoX(inner, 1, model=model, mesh=mesh, mode="sync", average_buffers=True)
    with torch.no_grad():
        model[1].running_mean.fill_(10.0 + r.rank)
        model[1].running_var.fill_(20.0 + r.rank)
    optimizer.step()
    averaged = model[1].running_mean.tolist(), model[1].running_var.tolist()
    with optimizer.outer_parameters():
        outer = model[1].running_mean.tolist(), model[1].running_var.tolist()
    optimizer.finish()
    assert averaged == outer == ([11.0] * 5, [21.0] * 5)  # of ranks 0 and 2


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.on("quad", group={"timeout_s": TIMEOUT_S})
def test_one_stage_of_a_site_has_buffers(r, first):
    """Two sites of two stages, of which one has running means; the other has no buffer."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sites", "stages"))
    site, stage = mesh.get_coordinate()
    torch.manual_seed(stage)
    model = nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5) if (stage == 0) == first else nn.Tanh())
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = lc.DiLoCoX(inner, 2, model=model, mesh=mesh, average_buffers=True, codec="sym4:bucket=64")
    for step in range(5):
        torch.manual_seed(10 * site + step)
        model(torch.randn(6, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish()
    both = [None] * 2
    dist.all_gather_object(both, model.state_dict(), group=mesh.get_group("sites"))
    assert not diloco_model.differing(*both)


@pytest.mark.later
@pytest.mark.on(4, timeout=90)
def test_a_silent_rank_of_a_site_ends_every_wait(r):
    """A rank of a site stops stepping: the other ranks of its site, and of the other site, hear of it by their deadlines."""
    r.init()
    sites = [dist.new_group([place, 2 + place], backend="lowcomm") for place in range(2)]
    replicas = [dist.new_group([2 * site, 2 * site + 1]) for site in range(2)]
    site, place = divmod(r.rank, 2)
    torch.manual_seed(7)
    model = nn.Linear(ddp_model.WIDTH, 7)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = lc.DiLoCoX(inner, EVERY, model=model, group=sites[place], replicas=replicas[site], mode="sync")
    _train(model, optimizer, site, range(EVERY))
    dist.barrier()
    for group, deadline_s in zip(optimizer._groups.made, (4, 8), strict=True):  # the first is over sites
        group.set_timeout(timedelta(seconds=deadline_s))
    if r.rank != 1:
        said = "outer_step failed" if r.rank else "collect a site's parameters|DiLoCoX outer step"
        with pytest.raises(dist.DistBackendError, match=said):
            _train(model, optimizer, site, range(EVERY, 2 * EVERY))
        r.say(f"told{r.rank}")
    for other in (0, 2, 3):  # connections stay until all have heard
        r.hear(f"told{other}", timeout_s=60)
