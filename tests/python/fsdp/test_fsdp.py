"""QSDP on FSDP2: `lc.fsdp.quantize` codes what it says, where it says, and nothing else."""

import pytest
import torch
import torch.distributed as dist
from collective_cases import bits
from fsdp_model import CODED, Spy, batch, crc, gathered, loss_of, make_model, shards_of, train, whole, wrapped
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import torch_lowcomm as lc

# ---- exact ---------------------------------------------------------------------------------------------------------


def _exact_run(r, backend, quantized, options):
    r.init(backend)
    mesh = init_device_mesh("cpu", (r.size,))
    policy = None
    if options == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = make_model(mesh=mesh, mp_policy=policy, checkpointed=options == "checkpointed")
    if quantized:
        lc.fsdp.quantize(model, weights="none", gradients="none")
    if options == "kept":
        for module in wrapped(model):
            module.set_reshard_after_forward(False)
    losses = train(r, model, 20, accumulate=2 if options == "kept" else 1)
    return {"losses": losses, **whole(model)}


@pytest.mark.later
@pytest.mark.parametrize("options", ["bf16", "checkpointed", "kept"])
def test_none_is_fsdp2_on_gloo_bit_for_bit(pair, options):
    wanted = pair(_exact_run, "gloo", False, options, timeout=90)
    got = pair(_exact_run, "lowcomm", True, options, timeout=90)
    for want, ours in zip(wanted, got, strict=True):
        for name, t in want.items():
            assert torch.equal(bits(t), bits(ours[name])), f"{name}: {(t - ours[name]).abs().max()}"


# ---- what is coded -------------------------------------------------------------------------------------------------


def _expected(r, shards, codec, coded, dtype=torch.float32):
    """Every parameter as the ranks must compute with it: coded shard by shard, or exact."""
    whole = {}
    for name, parts in shards.items():
        parts = [p.to(dtype) for p in parts]
        whole[name] = torch.cat([codec.roundtrip(p) for p in parts] if name.endswith(coded) else parts)
    return whole


def _weights(r, what):
    r.init("lowcomm")
    spec = "minmax4:bucket=128"
    codec = lc.codec(spec)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if what == "bf16" else None
    model = make_model(mesh=init_device_mesh("cpu", (r.size,)), mp_policy=policy)
    exact = (lambda name, p: name.endswith("back.weight")) if what == "predicate" else None
    lc.fsdp.quantize(model, weights=spec, gradients="none", exact=exact)
    coded = ("big.weight",) if what == "predicate" else CODED
    want = _expected(r, shards_of(r, model), codec, coded, torch.bfloat16 if what == "bf16" else torch.float32)
    seen = gathered(model)
    assert seen.keys() == want.keys()
    for name, t in want.items():
        assert torch.equal(bits(seen[name].reshape(t.shape)), bits(t)), name
    if what == "exact scope":
        with lc.exact():
            seen = gathered(model)
        for name, parts in shards_of(r, model).items():
            assert torch.equal(seen[name], torch.cat(parts)), name
    # The shard itself, what the optimizer steps, is never touched.
    before = shards_of(r, model)
    loss_of(model, batch(r.rank, 0)).backward()
    for name, parts in shards_of(r, model).items():
        assert all(torch.equal(a, b) for a, b in zip(parts, before[name], strict=True)), name
    return crc(seen.values())


@pytest.mark.parametrize("what", ["default", "predicate", "bf16", "exact scope"])
def test_weights_are_coded_inside_each_parameter(pair, quad, what):
    for pool in (pair, quad):
        crcs = pool(_weights, what)
        assert len(set(crcs)) == 1, "ranks compute with different weights"


def _same_codes(r, weights, checkpointed, kept):
    """Stochastic weights: all gathers of a step see the same codes, the next step's others."""
    r.init("lowcomm")
    Spy.seen = []
    model = make_model(mesh=init_device_mesh("cpu", (r.size,)), spied=True, checkpointed=checkpointed)
    lc.fsdp.quantize(model, weights=weights, gradients="qsgd8:bucket=256")
    if kept:
        model.set_reshard_after_forward(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)  # the shards stay: only the draws may change the codes
    steps = []
    for step in range(3):
        Spy.seen = []
        for k in range(3):  # accumulation
            loss_of(model, batch(r.rank, 3 * step + k)).backward()
        by_name = {}
        for when, name, weight in Spy.seen:
            by_name.setdefault(name, []).append((when, weight))
        for name, seen in by_name.items():
            assert {when for when, _ in seen} == {"forward", "backward"}
            assert len(seen) == 3 * (3 if checkpointed else 2), (name, len(seen))
            for when, weight in seen:
                assert torch.equal(bits(weight), bits(seen[0][1])), f"{name} in {when} of step {step}"
        steps.append({name: seen[0][1] for name, seen in by_name.items()})
        optimizer.step()
        optimizer.zero_grad()
    for name in steps[0]:
        if weights.startswith("qsgd"):
            assert not torch.equal(steps[0][name], steps[1][name]), f"{name}: step 1 reuses the draws of step 0"
            assert not torch.equal(steps[1][name], steps[2][name]), f"{name}: step 2 reuses the draws of step 1"
    return crc(w for s in steps for w in s.values())


@pytest.mark.parametrize(
    ("weights", "checkpointed", "kept"),
    [("qsgd4:bucket=256", False, False), ("qsgd4:bucket=256", True, False), ("qsgd4:bucket=256", False, True)],
    ids=["stochastic", "activation checkpointing", "not resharded"],
)
def test_forward_and_backward_see_the_same_codes(pair, weights, checkpointed, kept):
    crcs = pair(_same_codes, weights, checkpointed, kept)
    assert crcs[0] == crcs[1]


def _gradients(r, gradients, factor, accumulate):
    """The sharded gradients of one step, under a codec."""
    r.init("lowcomm")
    model = make_model(mesh=init_device_mesh("cpu", (r.size,)))
    lc.fsdp.quantize(model, weights="none", gradients=gradients)
    if factor:
        for module in wrapped(model):
            module.set_gradient_divide_factor(factor)
    for k in range(accumulate):
        loss_of(model, batch(r.rank, k)).backward()
    stats = lc.stats()[dist.group.WORLD.group_name]["reduce_scatter"]
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}, stats


@pytest.mark.parametrize("factor", [None, 3.0], ids=["AVG", "PREMUL_SUM"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients(pair, quad, factor, accumulate):
    for pool in (pair, quad):
        exact = pool(_gradients, "none", factor, accumulate)[0][0]
        got = pool(_gradients, "qsgd8:bucket=256", factor, accumulate)
        for rank_got, stats in got:
            assert stats["exact_calls"] == 0, stats
            for name, want in exact.items():
                error = (rank_got[name] - want).norm() / want.norm().clamp_min(1e-12)
                if name.endswith(CODED):
                    assert 0 < error < 0.03, f"{name}: relative error {error}"
                else:
                    assert torch.equal(bits(rank_got[name]), bits(want)), f"{name} must travel exact"


def test_divide_factor(r):
    """A divide factor of twice the world's size halves the mean, exactly."""
    r.init("lowcomm")
    got = []
    for value in (None, 2.0 * r.size):
        model = make_model(mesh=init_device_mesh("cpu", (r.size,)))
        lc.fsdp.quantize(model, weights="none", gradients="none")
        if value:
            for module in wrapped(model):
                module.set_gradient_divide_factor(value)
        loss_of(model, batch(r.rank, 0)).backward()
        got.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
    for name, mean in got[0].items():
        assert torch.equal(got[1][name] * 2, mean), name


# ---- training ------------------------------------------------------------------------------------------------------


def _quantized_run(r, weights, gradients, steps, mixed=False):
    r.init("lowcomm")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16) if mixed else None
    model = make_model(mesh=init_device_mesh("cpu", (r.size,)), mp_policy=policy)
    lc.fsdp.quantize(model, weights=weights, gradients=gradients)
    lc.reset_stats()
    losses = train(r, model, steps)
    stats = lc.stats()[dist.group.WORLD.group_name]
    mean = losses.clone()
    dist.all_reduce(mean)
    return mean / r.size, stats, crc(gathered(model).values())


@pytest.mark.later
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "bf16"])
def test_eight_bits_train_as_exact_does_for_a_quarter_of_the_bytes(pair, quad, mixed):
    pool = pair if mixed else quad
    exact = pool(_quantized_run, "none", "none", 40, mixed)
    coded = pool(_quantized_run, "minmax8:bucket=1024", "qsgd8:bucket=1024", 40, mixed)
    assert len({crc for _, _, crc in coded}) == 1
    losses, reference = coded[0][0], exact[0][0]
    assert losses[-5:].mean() < 0.9 * losses[0], losses
    assert losses[-5:].mean() == pytest.approx(reference[-5:].mean().item(), rel=0.05)
    least = 1.8 if mixed else 3.5  # norms, biases and the small matrix are a part of this small model
    for op in ("all_gather", "reduce_scatter"):
        ours, theirs = coded[0][1][op], exact[0][1][op]
        assert ours["calls"] == theirs["calls"], op
        assert theirs["wire_bytes"] / ours["wire_bytes"] > least, (op, ours, theirs)
        assert ours["ratio"] == pytest.approx(ours["raw_bytes"] / ours["wire_bytes"])


def test_mixed_dtypes_travel_exact(r):
    """A group whose parameters differ in dtype travels as raw bytes: exact, and counted so."""
    r.init("lowcomm")
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64).bfloat16().requires_grad_(False))
    fully_shard(model, mesh=init_device_mesh("cpu", (r.size,)))
    before = {name: p.full_tensor() for name, p in model.named_parameters()}
    lc.fsdp.quantize(model)
    lc.reset_stats()
    model.unshard()
    for name, p in model.named_parameters():
        assert torch.equal(p.detach(), before[name]), name
    model.reshard()
    stats = lc.stats()[dist.group.WORLD.group_name]["all_gather"]
    assert stats["exact_calls"] == stats["calls"] == 1, stats


def test_frozen_parameters(r):
    """Parameters without gradients are gathered and not reduced."""
    r.init("lowcomm")
    model = make_model()
    for name, p in model.named_parameters():
        p.requires_grad_("big" not in name)
    mesh = init_device_mesh("cpu", (r.size,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    lc.fsdp.quantize(model)
    lc.reset_stats()
    loss_of(model, batch(r.rank, 0)).backward()
    stats = lc.stats()[dist.group.WORLD.group_name]
    assert stats["all_gather"]["exact_calls"] == stats["reduce_scatter"]["exact_calls"] == 0, stats
    assert all((p.grad is None) == ("big" in name) for name, p in model.named_parameters())
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    exact = make_model(mesh=mesh)
    exact.load_state_dict(model.state_dict())
    loss_of(exact, batch(r.rank, 0)).backward()
    for name, gradient in gradients.items():
        want = dict(exact.named_parameters())[name].grad.full_tensor()
        step = (want.max() - want.min()) / 255
        assert (gradient - want).abs().max() <= 4 * step + 0.05 * want.abs().max(), name


def _plain_path(r):
    """No hook: the group's own policy codes FSDP2's flat buffers."""
    policy = "all_gather=minmax8:bucket=1024; reduce_scatter=qsgd8:bucket=1024"
    r.init("gloo")
    override = {"dp": ("lowcomm", lc.Options(policy=policy, min_bytes=4096))}
    mesh = init_device_mesh("cpu", (r.size,), mesh_dim_names=("dp",), backend_override=override)
    model = make_model(mesh=mesh)
    losses = train(r, model, 30)
    stats = lc.stats()[mesh.get_group("dp").group_name]
    assert stats["all_gather"]["exact_calls"] < stats["all_gather"]["calls"], stats
    return losses


def test_without_the_hook_a_policy_codes_the_flat_buffers(pair):
    losses = pair(_plain_path)[0]
    assert losses[-3:].mean() < losses[0]
