"""HSDP: shards coded by lc.fsdp.quantize, replicas by `replicate=` or their group's policy; every group's bytes counted."""

import pytest
import torch
import torch.distributed as dist
from fsdp_model import batch, crc, loss_of, make_model, train
from torch.distributed.device_mesh import init_device_mesh

import torch_lowcomm as lc

WEIGHTS, GRADIENTS, BETWEEN = "minmax8:bucket=1024", "qsgd8:bucket=1024", "sym4:bucket=1024"
STEPS = 12


def _mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def _hsdp(r, how):
    r.init("lowcomm", pg_options=lc.Options(min_bytes=0))
    mesh = _mesh()
    replicate, shard = (mesh[name].get_group() for name in ("replicate", "shard"))
    model = make_model(mesh=mesh)
    if how == "set_policy":
        lc.set_policy(replicate, f"all_reduce={BETWEEN}")
    if how == "next to":
        lc.set_policy(replicate, "all_reduce=qsgd8; broadcast=minmax8")
    lc.fsdp.quantize(
        model,
        weights=WEIGHTS,
        gradients=GRADIENTS,
        replicate={"keyword": BETWEEN, "next to": BETWEEN, "none": "none"}.get(how),
    )
    if how == "next to":
        policy = lc.fsdp.agreement.backend_of(replicate).policy
        assert policy == f"all_reduce={lc.codec(BETWEEN).spec}; broadcast={lc.codec('minmax8').spec}", policy
    lc.reset_stats()
    losses = train(r, model, STEPS)
    stats = {name: lc.stats(group)[group.group_name] for name, group in (("replicate", replicate), ("shard", shard))}
    if how in ("keyword", "set_policy", "next to"):
        codec, reduced = lc.codec(BETWEEN), stats["replicate"]["all_reduce"]
        flat = [
            sum(-(-p.shape[0] // 2) * p[0].numel() for p in block.parameters()) for block in model
        ]  # rows are halved
        # Half of a module's buffer to the other replica, and the sum of the other half back.
        payload = STEPS * sum(codec.encoded_bytes(n // 2) + codec.encoded_bytes(n - n // 2) for n in flat)
        assert reduced["exact_calls"] == 0, reduced
        assert payload <= reduced["wire_bytes"] <= 1.05 * payload, (payload, reduced)
    assert set(stats["replicate"]) == {"all_reduce"}
    for op in ("all_gather", "reduce_scatter"):
        assert stats["shard"][op]["exact_calls"] == 0
        assert 3.0 < stats["shard"][op]["ratio"] < 4, stats["shard"][op]
    checksums = [None] * r.size
    dist.all_gather_object(checksums, crc(p.to_local() for p in model.parameters()))
    assert checksums[:2] == checksums[2:], "a replica's shards"
    dist.destroy_process_group()
    return losses, stats["replicate"]["all_reduce"]


@pytest.mark.on("quad")
def test_every_group_is_coded_and_replicas_are_bit_identical(r):
    exact, whole = _hsdp(r, "none")
    for how in ("keyword", "set_policy", "next to"):
        losses, reduced = _hsdp(r, how)
        torch.testing.assert_close(losses, exact, rtol=0.25, atol=0)  # 4 bits, a dozen steps
        assert not torch.equal(losses, exact)
        assert whole["raw_bytes"] / reduced["wire_bytes"] > 6


@pytest.mark.on("quad")
def test_mistakes_and_differences(r):
    r.init("lowcomm")
    flat = make_model(mesh=init_device_mesh("cpu", (r.size,)))
    with pytest.raises(ValueError, match="expected replicate=None for a model without replicas"):
        lc.fsdp.quantize(flat, replicate=BETWEEN)
    mesh = _mesh()
    model = make_model(mesh=mesh)
    group = mesh["replicate"].get_group()
    backend = lc.fsdp.agreement.backend_of(group)
    with pytest.raises(ValueError, match="foo4"):
        lc.fsdp.quantize(model, replicate="foo4")
    # One rank's mistake, a difference between replicas and one inside a shard's group: all ranks hear of it.
    odd = r.rank == 3
    with pytest.raises(ValueError if odd else dist.DistBackendError, match="foo4"):
        lc.fsdp.quantize(model, replicate="foo4" if odd else BETWEEN)
    with pytest.raises(dist.DistBackendError, match="replicas"):
        lc.fsdp.quantize(model, replicate=BETWEEN if r.rank < 2 else None)
    with pytest.raises(dist.DistBackendError, match="replicas"):
        lc.fsdp.quantize(model, replicate=BETWEEN if odd else "sym8")
    assert backend.policy == ""
    lc.fsdp.quantize(model, replicate=BETWEEN)
    assert backend.policy == f"all_reduce={lc.codec(BETWEEN).spec}"
    loss_of(model, batch(r.rank, 0)).backward()


@pytest.mark.on("quad", alike=True)
def test_another_backend_shards_inside_a_host_and_lowcomm_codes_between(r):
    """As NCCL does inside hosts with GPUs; gloo takes its place here."""
    r.init("gloo")
    between = lc.Options(policy=f"all_reduce={BETWEEN}", min_bytes=0)
    override = {"hosts": ("lowcomm", between), "ranks": "gloo"}
    names = ("hosts", "ranks")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names, backend_override=override)
    model, exact = make_model(mesh=mesh), make_model(mesh=mesh)
    loss_of(model, batch(r.rank, 0)).backward()
    hosts = mesh["hosts"].get_group()
    stats = lc.stats(hosts)[hosts.group_name]["all_reduce"]
    assert stats["ratio"] > 6 and stats["exact_calls"] == 0, stats
    with lc.exact():
        loss_of(exact, batch(r.rank, 0)).backward()
    gradients, exactly = (
        torch.cat([p.grad.full_tensor().flatten() for p in each.parameters()]) for each in (model, exact)
    )
    assert 1e-3 < (gradients - exactly).norm() / exactly.norm() < 0.3
    return crc([gradients])
