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


@pytest.mark.later
@pytest.mark.parametrize("options", ["bf16", "checkpointed", "kept"])
@pytest.mark.on("pair", timeout=90)
def test_none_is_fsdp2_on_gloo_bit_for_bit(r, options):
    found, policy = [], None
    if options == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for backend in ("gloo", "lowcomm"):
        r.init(backend)
        mesh = init_device_mesh("cpu", (r.size,))
        model = make_model(mesh=mesh, mp_policy=policy, checkpointed=options == "checkpointed")
        if backend == "lowcomm":
            lc.fsdp.quantize(model, weights="none", gradients="none")
        if options == "kept":
            for module in wrapped(model):
                module.set_reshard_after_forward(False)
        losses = train(r, model, 20, accumulate=2 if options == "kept" else 1)
        found.append({"losses": losses, **whole(model)})
        dist.destroy_process_group()
    for name, t in found[0].items():
        assert torch.equal(bits(t), bits(found[1][name])), f"{name}: {(t - found[1][name]).abs().max()}"


def _expected(r, shards, codec, coded, dtype=torch.float32):
    """Every parameter as the ranks must compute with it: coded shard by shard, or exact."""
    whole = {}
    for name, parts in shards.items():
        parts = [p.to(dtype) for p in parts]
        whole[name] = torch.cat([codec.roundtrip(p) for p in parts] if name.endswith(coded) else parts)
    return whole


@pytest.mark.parametrize("what", ["default", "predicate", "bf16", "exact scope"])
@pytest.mark.on("pair", "quad", alike=True)
def test_weights_are_coded_inside_each_parameter(r, what):
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


@pytest.mark.parametrize("how", ["resharded", "activation checkpointing", "not resharded"])
@pytest.mark.on("pair", group={}, alike=True)
def test_forward_and_backward_see_the_same_codes(r, how):
    """Stochastic weights: all gathers of a step see the same codes, the next step's others."""
    checkpointed = how == "activation checkpointing"
    Spy.seen = []
    model = make_model(mesh=init_device_mesh("cpu", (r.size,)), spied=True, checkpointed=checkpointed)
    lc.fsdp.quantize(model, weights="qsgd4:bucket=256", gradients="qsgd8:bucket=256")
    if how == "not resharded":
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
        assert not torch.equal(steps[0][name], steps[1][name]), f"{name}: step 1 reuses the draws of step 0"
        assert not torch.equal(steps[1][name], steps[2][name]), f"{name}: step 2 reuses the draws of step 1"
    return crc(w for s in steps for w in s.values())


@pytest.mark.parametrize("factor", [None, 3.0], ids=["AVG", "PREMUL_SUM"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.on("pair", "quad", group={})
def test_gradients(r, factor, accumulate):
    found = []
    for gradients in ("none", "qsgd8:bucket=256"):
        model = make_model(mesh=init_device_mesh("cpu", (r.size,)))
        lc.fsdp.quantize(model, weights="none", gradients=gradients)
        if factor:
            for module in wrapped(model):
                module.set_gradient_divide_factor(factor)
        lc.reset_stats()
        for k in range(accumulate):
            loss_of(model, batch(r.rank, k)).backward()
        found.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
    stats = lc.stats()[dist.group.WORLD.group_name]["reduce_scatter"]
    assert stats["exact_calls"] == 0, stats
    exact, coded = found
    for name, want in exact.items():
        error = (coded[name] - want).norm() / want.norm().clamp_min(1e-12)
        if name.endswith(CODED):
            assert 0 < error < 0.03, f"{name}: relative error {error}"
        else:
            assert torch.equal(bits(coded[name]), bits(want)), f"{name} must travel exact"


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


def _quantized_run(r, weights, gradients, mixed):
    """The mean of the ranks' losses, what was counted, and the weights at the end."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16) if mixed else None
    model = make_model(mesh=init_device_mesh("cpu", (r.size,)), mp_policy=policy)
    lc.fsdp.quantize(model, weights=weights, gradients=gradients)
    lc.reset_stats()
    mean = train(r, model, 40)
    stats = lc.stats()[dist.group.WORLD.group_name]
    dist.all_reduce(mean)
    return mean / r.size, stats, crc(gathered(model).values())


@pytest.mark.later
@pytest.mark.parametrize(
    "mixed",
    [
        pytest.param(mixed, marks=pytest.mark.on(pool, group={}, alike=True), id=name)
        for mixed, pool, name in ((False, "quad", "fp32"), (True, "pair", "bf16"))
    ],
)
def test_eight_bits_train_as_exact_does_for_a_quarter_of_the_bytes(r, mixed):
    reference, theirs, _ = _quantized_run(r, "none", "none", mixed)
    losses, ours, weights = _quantized_run(r, "minmax8:bucket=1024", "qsgd8:bucket=1024", mixed)
    assert losses[-5:].mean() < 0.9 * losses[0], losses
    assert losses[-5:].mean() == pytest.approx(reference[-5:].mean().item(), rel=0.05)
    least = 1.8 if mixed else 3.5  # norms, biases and the small matrix are a part of this small model
    for op in ("all_gather", "reduce_scatter"):
        assert ours[op]["calls"] == theirs[op]["calls"], op
        assert theirs[op]["wire_bytes"] / ours[op]["wire_bytes"] > least, (op, ours, theirs)
        assert ours[op]["ratio"] == pytest.approx(ours[op]["raw_bytes"] / ours[op]["wire_bytes"])
    return weights


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


def test_without_the_hook_a_policy_codes_the_flat_buffers(r):
    policy = "all_gather=minmax8:bucket=1024; reduce_scatter=qsgd8:bucket=1024"
    r.init("gloo")
    override = {"dp": ("lowcomm", lc.Options(policy=policy, min_bytes=4096))}
    mesh = init_device_mesh("cpu", (r.size,), mesh_dim_names=("dp",), backend_override=override)
    model = make_model(mesh=mesh)
    losses = train(r, model, 30)
    stats = lc.stats()[mesh.get_group("dp").group_name]
    assert stats["all_gather"]["exact_calls"] < stats["all_gather"]["calls"], stats
    assert losses[-3:].mean() < losses[0]
