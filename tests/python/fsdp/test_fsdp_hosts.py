"""lc.fsdp.quantize(hosts=mesh), hierarchical: two hosts of two ranks, exact inside and coded once between."""

import signal

import pytest
import torch
import torch.distributed as dist
from collective_cases import bits
from fsdp_model import CODED, batch, crc, expect_lost, gathered, loss_of, make_model, train, whole, wrapped
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import torch_lowcomm as lc

HOSTS, LOCALS = 2, 2
WEIGHTS = "minmax4:bucket=128"


def _meshes(r):
    return init_device_mesh("cpu", (r.size,)), init_device_mesh(
        "cpu", (HOSTS, LOCALS), mesh_dim_names=("hosts", "ranks")
    )


@pytest.mark.on("quad", group={}, alike=True)
def test_all_ranks_see_the_weights_that_a_flat_group_gives(r):
    flat, hosts = _meshes(r)
    model, other = make_model(mesh=flat), make_model(mesh=flat)
    lc.fsdp.quantize(model, weights=WEIGHTS, gradients="none", hosts=hosts)
    lc.fsdp.quantize(other, weights=WEIGHTS, gradients="none")
    ours, theirs = gathered(model), gathered(other)
    for name, t in theirs.items():
        assert torch.equal(bits(ours[name]), bits(t)), name  # the nearest value draws nothing: as over the flat group
    exact = whole(model)
    assert any(not torch.equal(ours[name], exact[name]) for name in ours if name.endswith(CODED))
    return crc(ours.values())


@pytest.mark.on("quad", group={}, alike=True)
def test_a_quantized_master_is_what_all_hosts_decoded(r):
    flat, hosts = _meshes(r)
    model = make_model(mesh=flat)
    lc.fsdp.quantize(model, weights="lattice8:bucket=128", gradients="levels4", master="quantized", hosts=hosts)
    train(r, model, 3)
    seen = gathered(model)
    for name, t in whole(model).items():
        assert torch.equal(bits(seen[name]), bits(t)), name  # the shards are what everybody decoded
    return crc(seen.values())


@pytest.mark.parametrize(("weights", "gradients"), [(WEIGHTS, "qsgd8:bucket=256"), ("none", "none")])
@pytest.mark.on("quad")
def test_a_host_sends_one_coded_copy(r, weights, gradients):
    r.init("lowcomm")
    flat, hosts = _meshes(r)
    model = make_model(mesh=flat)
    levels = lc.fsdp.quantize(model, weights=weights, gradients=gradients, hosts=hosts).hosts
    train(r, model, 1)
    lc.reset_stats()
    loss_of(model, batch(r.rank, 5)).backward()
    between, inside = (lc.stats(group)[group.group_name] for group in (levels.between, levels.inside))
    assert not lc.stats(flat.get_group())[flat.get_group().group_name], "something went over the flat group"

    def payload(spec):
        """Of a rank's shards once: what goes to the rank at this place of the other host."""
        codec, total = lc.codec(spec), 0
        for block in model:
            for p in block.parameters():
                n = -(-p.shape[0] // r.size) * p[0].numel()
                coded = spec != "none" and p.ndim > 1 and p.numel() >= 1024
                total += codec.encoded_bytes(n) if coded else 4 * n
        return total

    # Forward and backward gather; one reduction.
    for op, spec, times in (("all_gather", weights, 2), ("reduce_scatter", gradients, 1)):
        least = times * (HOSTS - 1) * payload(spec)
        assert least <= between[op]["wire_bytes"] <= 1.05 * least + 4096, (op, least, between[op])
        assert between[op]["exact_calls"] == (between[op]["calls"] if spec == "none" else 0)
    assert inside["reduce_scatter"]["exact_calls"] == inside["reduce_scatter"]["calls"] == len(model)


def _trains(r, how, overlap, hierarchical):
    flat, hosts = _meshes(r)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if how == "bf16" else None
    model = make_model(3, mesh=flat, mp_policy=policy)
    codecs = {"weights": "none", "gradients": "none"} if how == "none" else {"weights": "qsgd8:bucket=256"}
    lc.fsdp.quantize(model, **codecs, overlap=overlap, **({"hosts": hosts} if hierarchical else {}))
    if how == "divided":
        for module in wrapped(model):
            module.set_gradient_divide_factor(3.0)
    losses = train(r, model, 6, accumulate=2)
    return {"losses": losses, **whole(model)}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["bf16", "divided", "none"])
@pytest.mark.on("quad")
def test_training_is_that_of_the_flat_group_and_overlap_changes_no_bit(r, how):
    """Exact sums are in another order than the flat group's; a run's draws are those of a group of its own."""
    found = []
    for options in ((True, False), (False, True), (True, True)):
        r.init("lowcomm")
        found.append(_trains(r, how, *options))
        dist.destroy_process_group()
    flat, turn, overlap = found
    for name, t in turn.items():
        assert torch.equal(bits(t), bits(overlap[name])), name
    torch.testing.assert_close(turn["losses"], flat["losses"], rtol=1e-3 if how == "none" else 0.05, atol=0)


@pytest.mark.on("quad")
def test_mistakes(r):
    r.init("lowcomm")
    flat, hosts = _meshes(r)
    model = make_model(mesh=flat)
    with pytest.raises(TypeError, match="hosts: expected 'auto'.*got int"):
        lc.fsdp.quantize(model, hosts=2)
    with pytest.raises(ValueError, match=r"expected a mesh \[hosts, ranks of a host\], got 1 dimensions"):
        lc.fsdp.quantize(model, hosts=flat)
    with pytest.raises(ValueError, match=r"host by host.*\[0, 1, 2, 3\] on hosts of \[\[0, 2\], \[1, 3\]\]"):
        lc.fsdp.quantize(model, hosts=DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("hosts", "ranks")))
    with pytest.raises(dist.DistBackendError, match="hosts 2x2|hosts flat"):
        lc.fsdp.quantize(model, hosts=hosts if r.rank else "flat")
    lc.fsdp.quantize(model, hosts=hosts)
    loss_of(model, batch(r.rank, 0)).backward()


@pytest.mark.on(4, allow_exit={3: -signal.SIGKILL})
def test_a_killed_rank_is_an_error_on_every_rank_of_both_hosts(r):
    r.init("lowcomm", timeout_s=600)
    flat, hosts = _meshes(r)
    model = make_model(3, mesh=flat)
    lc.fsdp.quantize(model, hosts=hosts)
    train(r, model, 1)
    expect_lost(r, model, 3, r"(?s)(all_gather|reduce_scatter).*rank \d")
