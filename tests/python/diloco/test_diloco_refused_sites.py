"""lc.DiLoCoX refuses models that sites cannot share, on all ranks and by the parameter's name, and warns of costly ones."""

import logging

import pytest
import torch
import torch.distributed as dist
from kept_log import kept_log
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import torch_lowcomm as lc
from torch_lowcomm.diloco.parameters import held

ROWS, COLUMNS = 8, 6
# By name: (placement, rows that the first and the second rank of a site hold).
UNMAPPED = {
    "interleaved": (_StridedShard(0, split_factor=2), (4, 4)),
    "uneven by hand": (Shard(0), (5, 3)),
    "partial": (Partial(), (ROWS, ROWS)),
}


def _sites(name):
    """A mesh of two sites of two ranks."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("sites", name))


@pytest.mark.parametrize("where", [(0, 1, 2, 3), (3,)], ids=["all ranks", "one rank"])
@pytest.mark.parametrize("what", UNMAPPED)
@pytest.mark.on("quad", group={})
def test_a_part_that_is_no_box_is_refused_on_all_ranks(r, what, where):
    mesh = _sites("shards")
    placement, rows = UNMAPPED[what]
    model = nn.Module()
    torch.manual_seed(0)
    model.before = nn.Parameter(torch.zeros(3))
    placement = placement if r.rank in where else Shard(0)
    here = rows[r.rank % 2] if r.rank in where else ROWS // 2
    part = torch.ones(here, COLUMNS)
    shape = {"shape": torch.Size((ROWS, COLUMNS)), "stride": (COLUMNS, 1)}
    model.odd = nn.Parameter(DTensor.from_local(part, mesh["shards"], [placement], run_check=False, **shape))
    said = "odd: expected every rank to hold one range of each dimension of a parameter"
    with pytest.raises((ValueError, dist.DistBackendError), match=f"^DiLoCoX: {said}" if r.rank == 3 else said):
        lc.DiLoCoX(torch.optim.SGD(model.parameters(), lr=0.1), 3, model=model, mesh=mesh)
    # Nothing is left under way: the next one works.
    optimizer = lc.DiLoCoX(torch.optim.SGD([model.before], lr=0.1), 1, group=mesh.get_group("sites"), mode="sync")
    model.before.grad = torch.ones(3)
    optimizer.step()
    optimizer.finish()


@pytest.mark.on("quad", group={})
def test_fsdp2_over_tensor_parallelism_is_one_message(r):
    """A site of two by two ranks: FSDP2 divides what tensor parallelism has divided, rows and columns, evenly or not."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("sites", "shards", "parts"))
    models = []
    for _ in range(2):
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(12, 36), nn.Tanh(), nn.Linear(36, 7), nn.LayerNorm(7))
        parallelize_module(model, mesh["parts"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        models.append(fully_shard(model, mesh=mesh["shards"]))
    plain, model = models
    for name, own, whole, offset in held(model.named_parameters(), range(4)):
        box = tuple(slice(begin, begin + size) for begin, size in zip(offset, own.shape, strict=True))
        expected = model.get_parameter(name).full_tensor()
        assert tuple(expected.shape) == whole and torch.equal(expected[box], own), name
    steps = [torch.optim.SGD(one.parameters(), lr=0.1) for one in models]
    options = {"codec": None, "mode": "sync", "outer_lr": 1.0, "outer_momentum": 0.0}
    steps[1] = lc.DiLoCoX(steps[1], 2, model=model, mesh=mesh, **options)
    for number in range(4):
        x = torch.randn(16, 12, generator=torch.Generator().manual_seed(number))
        for one, optimizer in zip(models, steps, strict=True):
            one(x).square().sin().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    elements = sum(p.numel() for p in model.parameters())
    assert sum(steps[1].report["stripe_elements"]) == elements and len(steps[1].report["stripe_elements"]) == 4
    steps[1].finish()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor(), other.full_tensor())


@pytest.mark.parametrize("how", ["replicas", "dp_replicate", "hsdp"])
@pytest.mark.on("quad", group={})
def test_replicas_that_differ_are_refused_on_all_ranks(r, how):
    """One element of one parameter of rank 3, the second replica of the second site, is another one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    if how == "hsdp":
        mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("sites", "replicate", "shards"))
        fully_shard(model, mesh=mesh["replicate", "shards"])
    else:
        mesh = _sites(how)
    if r.rank == 3:
        with torch.no_grad():
            weight = model[1].weight
            (weight.to_local() if isinstance(weight, DTensor) else weight)[0, 0] += 1
    with pytest.raises((ValueError, dist.DistBackendError)) as error:
        lc.DiLoCoX(torch.optim.SGD(model.parameters(), lr=0.1), 3, model=model, mesh=mesh)
    text = str(error.value)
    assert "1.weight" in text, text
    if how == "hsdp" or r.rank >= 2:
        assert "expected replicas in a site to hold equal values, got checksum" in text, text


@pytest.mark.parametrize("how", ["dp", "cluster", "stages", "replicas"])
@pytest.mark.on("quad", group={})
def test_replicas_that_nothing_names_are_warned_of_once_a_site(r, how):
    mesh = _sites("stages" if how == "stages" else "replicas" if how == "replicas" else "dp")
    torch.manual_seed(r.rank % 2 if how == "stages" else 0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8))
    arguments = {"mesh": mesh}
    if how == "cluster":
        arguments = {"group": mesh.get_group("sites"), "cluster": mesh.get_group("dp")}
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with kept_log(logging.WARNING) as texts:
        optimizer = lc.DiLoCoX(inner, 1, model=model, mode="sync", **arguments)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert (optimizer.report["stripe_elements"] == [whole]) == (how != "replicas"), (
        "it works, at the cost that it tells"
    )
    optimizer.finish()
    if how in ("stages", "replicas") or r.rank in (1, 3):
        assert not texts
        return
    remedy = "name the mesh's dimension 'dp' 'replicas', or pass replicas=" if how == "dp" else "Then pass replicas="
    (text,) = texts
    assert f"ranks [{r.rank}, {r.rank + 1}] of this site" in text and "sends 2 messages" in text and remedy in text


@pytest.mark.on(2)
def test_states_of_other_outer_steps_are_refused_on_all_ranks_of_the_site(r, port):
    """Rank 1 of a site resumes from another run, whose interval was twice as long."""
    r.init()
    torch.manual_seed(0)
    model = nn.Linear(6, 8)

    def loop(run, every, **options):
        shared = dist.PrefixStore(run, dist.TCPStore("127.0.0.1", port, is_master=False))
        members = lc.Membership(shared, "a", site=dist.group.WORLD)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        everyone = {"model": model, "group": members, "replicas": dist.group.WORLD, "mode": "sync"}
        return lc.DiLoCoX(inner, every, **everyone, **options), members

    states = []
    for every in (3, 6):
        optimizer, members = loop(f"every {every}", every)
        for _ in range(6):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        states.append(optimizer.state_dict())
        members.leave()
    said = "^DiLoCoX: resume: expected states of one outer step on all ranks of the site, got .2, 1. by rank .0: none.$"
    with pytest.raises(ValueError, match=said):
        loop("again", 3, resume=states[r.rank])
