"""Mistakes that lc.fsdp.quantize refuses, on which ranks, and the state after a refusal."""

import pytest
import torch
import torch.distributed as dist
from fsdp_model import batch, loss_of, make_model, wrapped
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_lowcomm as lc

MINMAX2 = "minmax2:bucket=64"


def _exact_gathers(r, model):
    """One forward pass: (calls, of these exact) of this rank's all_gathers."""
    lc.reset_stats()
    with torch.no_grad():
        model(batch(r.rank, 0))
    gathers = lc.stats(dist.group.WORLD)[dist.group.WORLD.group_name]["all_gather"]
    return gathers["calls"], gathers["exact_calls"]


def test_local_mistakes(r):
    """Every rank makes the same mistake."""
    r.init("lowcomm")
    mesh = init_device_mesh("cpu", (r.size,))
    with pytest.raises(ValueError, match="expected a model wrapped by fully_shard"):
        lc.fsdp.quantize(nn.Linear(2, 2))
    replicated = replicate(nn.Sequential(nn.Linear(64, 64)), mesh=mesh)
    with pytest.raises(ValueError, match="not sharded"):
        lc.fsdp.quantize(replicated)
    model = make_model(mesh=mesh)
    for arguments, named in [({"weights": "foo8"}, "foo8"), ({"gradients": "qsgd9"}, r"expected 1\.\.\.8|qsgd9")]:
        with pytest.raises(ValueError, match=named):
            lc.fsdp.quantize(model, **arguments)
    with pytest.raises(TypeError, match=r"exact: expected a function of \(name, parameter\).* got list"):
        lc.fsdp.quantize(model, exact=["0.weight"])
    assert _exact_gathers(r, model)[0] == _exact_gathers(r, model)[1]
    lc.fsdp.quantize(model)
    with pytest.raises(ValueError, match="not quantized yet"):
        lc.fsdp.quantize(model)
    gloo = dist.new_group(backend="gloo")
    other = make_model(mesh=DeviceMesh.from_group(gloo, "cpu"))
    with pytest.raises(ValueError, match="expected a group of backend lowcomm"):
        lc.fsdp.quantize(other)


@pytest.mark.parametrize("what", ["codec", "exact"])
@pytest.mark.on("quad")
def test_ranks_that_disagree_stay_unquantized(r, what):
    """Ranks that disagree hear what differs, and every one keeps a model that is not quantized."""
    r.init("lowcomm")
    model = make_model(mesh=init_device_mesh("cpu", (r.size,)))
    odd = r.rank == r.size - 1
    arguments = {
        "codec": {"weights": "minmax8" if odd else "minmax4"},
        # In the last of the groups: those before it agree.
        "exact": {"exact": lambda name, _: odd and name == "1.big.weight"},
    }[what]
    named = {"codec": "minmax[48].*minmax[48]", "exact": "module 1.*none"}[what]
    with pytest.raises(dist.DistBackendError, match=rf"(?s){named}"):
        lc.fsdp.quantize(model, **arguments)
    calls, exact = _exact_gathers(r, model)
    assert calls == exact > 0
    lc.fsdp.quantize(model)
    calls, exact = _exact_gathers(r, model)
    assert exact < calls
    loss_of(model, batch(r.rank, 0)).backward()


@pytest.mark.on("quad")
def test_a_mistake_of_one_rank_reaches_the_others(r):
    """The others get the mistake of one rank as an error of theirs, at once, and nothing has changed."""
    r.init("lowcomm")
    model = make_model(mesh=init_device_mesh("cpu", (r.size,)))

    def predicate(name, parameter):
        raise KeyError("no such layer")

    if r.rank == 1:
        with pytest.raises(KeyError, match="no such layer"):
            lc.fsdp.quantize(model, exact=predicate)
    else:
        with pytest.raises(dist.DistBackendError, match="(?s)rank 1.*no such layer|no such layer.*rank 1"):
            lc.fsdp.quantize(model)
    lc.fsdp.quantize(model)
    calls, exact = _exact_gathers(r, model)
    assert exact < calls


@pytest.mark.parametrize("first", ["half", "all"])
@pytest.mark.parametrize("wrong", ["differs", "raises"])
@pytest.mark.on("quad", timeout=30)
def test_groups_hear_what_others_of_the_model_find(r, first, wrong):
    """A module sharded over all ranks next to one over half of them: what a half finds, the other half hears."""
    r.init("lowcomm")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("halves", "half"))
    meshes = {"half": mesh["half"], "all": mesh["halves", "half"]._flatten("all")}
    model = make_model()
    for block, over in zip(model, (first, "all" if first == "half" else "half"), strict=True):
        fully_shard(block, mesh=meshes[over])
    in_half = "0.big.weight" if first == "half" else "1.big.weight"
    odd = r.rank == 0
    if wrong == "differs":
        with pytest.raises(dist.DistBackendError, match="none" if r.rank < 2 else r"(?s)rank [01].*none"):
            lc.fsdp.quantize(model, exact=lambda name, _: odd and name == in_half)
    else:
        with pytest.raises(ValueError if odd else dist.DistBackendError, match="foo8"):
            lc.fsdp.quantize(model, weights="foo8" if odd else MINMAX2)
    comms = lc.fsdp.quantize(model)  # a model that kept nothing of it, on every rank
    loss_of(model, batch(r.rank, 0)).backward()
    assert comms.state_dict()["gradients.0"] == 1


def test_quantize_while_gathered(r):
    """The choice of coded parameters does not depend on whether the parameters are gathered when quantize is called."""
    r.init("lowcomm")
    model = make_model(blocks=1, mesh=init_device_mesh("cpu", (r.size,)))
    norm = model[0].norm.weight
    nn.init.normal_(norm)
    expected = norm.full_tensor()
    for module in wrapped(model):
        module.unshard()
    asked = []
    lc.fsdp.quantize(model, weights=MINMAX2, exact=lambda name, _: asked.append(name) or name == "0.back.weight")
    # Norms, biases and the small matrix are settled before.
    assert sorted(asked) == ["0.back.weight", "0.big.weight"]
    for module in wrapped(model):
        module.reshard()
    back = model[0].back.weight.full_tensor()
    big = model[0].big.weight.full_tensor()
    model[0].unshard()
    assert torch.equal(model[0].norm.weight, expected)
    assert torch.equal(model[0].back.weight, back)
    assert not torch.equal(model[0].big.weight, big)


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.head = nn.Linear(64, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens))


@pytest.mark.parametrize("keep", ["embed.weight", "head.weight", ""])
def test_tied_parameters_stay_exact_by_any_name(r, keep):
    """The predicate is asked by every name of a tied parameter."""
    r.init("lowcomm")
    torch.manual_seed(3)
    model = fully_shard(_Tied(), mesh=init_device_mesh("cpu", (r.size,)))
    lc.fsdp.quantize(model, weights=MINMAX2, exact=lambda name, _: name == keep)
    lc.reset_stats()
    model(torch.arange(8)).sum().backward()
    ops = lc.stats(dist.group.WORLD)[dist.group.WORLD.group_name]
    for op in ("all_gather", "reduce_scatter"):
        assert ops[op]["exact_calls"] == (ops[op]["calls"] if keep else 0), (op, ops[op])


def test_other_gradients_than_planned_travel_exact(r):
    """A layout made for other gradients is not used, even where the sizes fit."""
    r.init("lowcomm")
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[1].weight.requires_grad_(False)
    fully_shard(model, mesh=init_device_mesh("cpu", (r.size,)))
    lc.fsdp.quantize(model)
    name = dist.group.WORLD.group_name
    lc.reset_stats()
    model(torch.randn(4, 64)).sum().backward()
    assert lc.stats()[name]["reduce_scatter"]["exact_calls"] == 0
    model[0].weight.requires_grad_(False)
    model[1].weight.requires_grad_(True)
    lc.reset_stats()
    model(torch.randn(4, 64)).sum().backward()
    reduced = lc.stats()[name]["reduce_scatter"]
    assert reduced["exact_calls"] == reduced["calls"] == 1
    assert "other parameters" in next(iter(reduced["exact_because"]))


def test_a_nan_gradient_is_named(r):
    """A gradient that overflowed: the rank that has it says so, the others learn which it was."""
    r.init("lowcomm", timeout_s=20)
    model = make_model(mesh=init_device_mesh("cpu", (r.size,)))
    lc.fsdp.quantize(model)
    x = batch(r.rank, 0)
    if r.rank == 1:
        x[0, 0] = float("nan")
        with pytest.raises(ValueError, match=r"(?i)nan|finite"):
            loss_of(model, x).backward()
    else:
        with pytest.raises(dist.DistBackendError, match="rank 1"):
            loss_of(model, x).backward()
    dist.barrier()
    out = torch.empty(r.size)
    dist.all_gather_into_tensor(out, torch.ones(1))
