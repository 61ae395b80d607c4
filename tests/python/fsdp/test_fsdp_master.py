"""`lc.fsdp.quantize(master="quantized")`: the optimizer steps what every rank computed with (QSDP's Eq. 2)."""

import pytest
import torch
from collective_cases import bits
from fsdp_model import CODED, Spy, batch, expect_resumed, loss_of, make_model, shards_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import torch_lowcomm as lc


def _make(r, weights, **kwargs):
    model = make_model(mesh=init_device_mesh("cpu", (r.size,)), **kwargs)
    return model, lc.fsdp.quantize(model, weights=weights, gradients="none", master="quantized")


def _equal(a, b):
    return torch.equal(bits(a), bits(b))


@pytest.mark.parametrize(
    ("weights", "checkpointed"),
    [("minmax4:bucket=128", True), ("lattice6:bucket=256", False), ("levels3:bucket=64", False)],
)
@pytest.mark.on("pair", "quad")  # four have shards that are padded
def test_the_shard_becomes_what_it_was_decoded_to(r, weights, checkpointed):
    """At the first gather after a step the shards become what all compute with, at no other, and that is stepped."""
    r.init("lowcomm")
    Spy.seen = []
    model, _ = _make(r, weights, spied=True, checkpointed=checkpointed)
    lr = 0.01
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(3):
        before = shards_of(r, model)
        Spy.seen = []
        for k in range(3):  # accumulation
            loss_of(model, batch(r.rank, 3 * step + k)).backward()
            now = shards_of(r, model)
            for name, shards in now.items():
                moved = not all(_equal(a, b) for a, b in zip(shards, before[name], strict=True))
                assert moved == (k == 0 and name.endswith(CODED)), (step, k, name)
            before = now
            for when, name, weight in Spy.seen:
                key = name.replace("block", "") + ".big.weight"
                assert _equal(weight, torch.cat(now[key])), f"{key} in {when} of step {step}"
        stepped = {name: p.to_local() - lr * p.grad.to_local() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.to_local(), stepped[name], rtol=1e-6, atol=1e-6)


def test_a_write_that_no_version_shows(r):
    """The next gather sends values that were written behind the versions' back, norms too."""
    r.init("lowcomm")
    codec = lc.codec("minmax4:bucket=128")
    model, _ = _make(r, "minmax4:bucket=128")
    for factor in (1.0, 0.5, -1.0):
        for p in model.parameters():
            p.to_local().detach().mul_(factor)
        want = shards_of(r, model)
        model[0].unshard()
        norm, big = model[0].norm.weight.detach().clone(), model[0].big.weight.detach().clone()
        model[0].reshard()
        assert _equal(norm, torch.cat(want["0.norm.weight"]))
        assert _equal(big, torch.cat([codec.roundtrip(shard) for shard in want["0.big.weight"]]))
        assert _equal(big, torch.cat(shards_of(r, model)["0.big.weight"]))


def test_an_exact_gather_leaves_the_shard_alone(r):
    r.init("lowcomm")
    model, _ = _make(r, "minmax4:bucket=128")
    before = shards_of(r, model)
    with lc.exact():
        loss_of(model, batch(r.rank, 0)).backward()
    for name, shards in shards_of(r, model).items():
        assert all(_equal(a, b) for a, b in zip(shards, before[name], strict=True)), name


@pytest.mark.parametrize(("weights", "after"), [("minmax4:bucket=128", "evaluation"), ("lattice6:bucket=256", "step")])
def test_a_resumed_run_goes_on_bit_for_bit(r, weights, after):
    """A checkpoint after a step holds what the next gather encodes; after a forward pass, what it was decoded to."""

    def make():
        model, comms = _make(r, weights)
        return model, comms, torch.optim.AdamW(model.parameters(), lr=3e-3)

    def visit(model, comms):
        if after == "evaluation":
            with torch.no_grad():
                model(batch(r.rank, 99))
        assert comms.state_dict()["master.0"] == (after == "evaluation")

    expect_resumed(r, make, visit)


def _regression(r, weights, master):
    """Moves a matrix by 0.05 in small steps, to noisy products' gradients; how far from its goal it ends (rms)."""
    torch.manual_seed(1)
    model = nn.Linear(64, 64, bias=False)
    goal = model.weight.detach() + 0.05 * torch.randn(64, 64)
    fully_shard(model, mesh=init_device_mesh("cpu", (r.size,)))
    lc.fsdp.quantize(model, weights=weights, gradients="none", master=master)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003)
    for step in range(500):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1000 * r.rank + step))
        (model(x) - x @ goal.t()).square().sum(1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return (model.weight.full_tensor() - goal).square().mean().sqrt().item()


@pytest.mark.slow
@pytest.mark.on("pair", group={})
def test_nearest_stalls_where_the_lattice_does_not(r):
    """QSDP's Eq. 2 at 8 bits: an update under half a step moves nothing to the nearest value; on average it moves a lattice."""
    exact = _regression(r, "none", "fp32")
    kept = _regression(r, "minmax8:bucket=1024", "fp32")
    nearest = _regression(r, "minmax8:bucket=1024", "quantized")
    lattice = _regression(r, "lattice8:bucket=1024", "quantized")
    assert max(exact, kept) < 0.005, "learned: the goal was 0.05 away"
    assert nearest > 0.025
    assert lattice < 0.01


@pytest.mark.on("pair", "quad")
def test_mistakes(r):
    r.init("lowcomm")
    mesh = init_device_mesh("cpu", (r.size,))
    model = make_model(mesh=mesh)
    with pytest.raises(ValueError, match="master: expected 'fp32' or 'quantized', got 'int8'"):
        lc.fsdp.quantize(model, master="int8")
    with pytest.raises(ValueError, match="master='quantized': expected a codec for the weights, got 'none'"):
        lc.fsdp.quantize(model, weights="none", master="quantized")
    mixed = make_model(mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"master='quantized': expected shards gathered as they are.*torch.bfloat16"):
        lc.fsdp.quantize(mixed, master="quantized")
    if r.size == 4:
        replicas = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        with pytest.raises(ValueError, match=r"master='quantized': expected ranks that only shard, got replicas"):
            lc.fsdp.quantize(make_model(mesh=replicas), master="quantized")
    comms = lc.fsdp.quantize(model, master="quantized")
    other = lc.fsdp.quantize(make_model(mesh=mesh))
    with pytest.raises(ValueError, match=r"missing: \['master.0', 'master.1'\]"):
        comms.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match=r"unexpected: \['master.0', 'master.1'\]"):
        other.load_state_dict(comms.state_dict())
