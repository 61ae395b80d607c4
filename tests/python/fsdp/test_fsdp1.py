"""FSDP1 with lc.fsdp.fsdp1.hook for gradients and the group's policy for weights, by every strategy that runs on the CPU."""

import warnings

import pytest
import torch
import torch.distributed as dist
from fsdp_model import crc, make_model, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import torch_lowcomm as lc

WEIGHTS, GRADIENTS = "minmax8:bucket=1024", "qsgd8:bucket=1024"


def _model(r, strategy, group=None, **more):
    blocks = make_model(2)
    wrap = ModuleWrapPolicy({type(blocks[0])})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(
            blocks,
            process_group=group,
            sharding_strategy=ShardingStrategy[strategy],
            auto_wrap_policy=wrap,
            device_id=torch.device("cpu"),
            use_orig_params=True,
            **more,
        )


def _train(r, model):
    losses = train(r, model, 15)
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return losses, crc(model.parameters())


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.on("pair", group={"pg_options": lc.Options(min_bytes=0)}, alike=True)
def test_the_hook_codes_gradients(r, strategy):
    found = {}
    for how in ("plain", "none", "coded"):
        model = _model(r, strategy)
        if how == "coded":
            lc.set_policy(f"all_gather={WEIGHTS}")
        if how != "plain":
            state = lc.fsdp.fsdp1.State(gradients=GRADIENTS if how == "coded" else "none")
            model.register_comm_hook(state, lc.fsdp.fsdp1.hook)
        lc.reset_stats()
        found[how] = _train(r, model)
    (plain, exact, coded), weights = zip(*found.values(), strict=True)
    op = "all_reduce" if strategy == "NO_SHARD" else "reduce_scatter"
    assert torch.equal(plain, exact), "`none` is FSDP1's own arithmetic at two ranks"
    assert weights[0] == weights[1]
    assert not torch.equal(coded, exact)
    torch.testing.assert_close(coded, exact, rtol=0.05, atol=0)
    stats = lc.stats()[dist.group.WORLD.group_name]
    assert stats[op]["exact_calls"] == 0
    assert stats[op]["ratio"] > 3.8, stats[op]
    if strategy != "NO_SHARD":
        assert state.state_dict() == {"calls": stats[op]["calls"]}
        assert stats["all_gather"]["calls"] > 0
        assert stats["all_gather"]["ratio"] > 3.5, stats["all_gather"]
    return weights


@pytest.mark.on("quad", group={})
def test_hybrid_shards_by_policies(r):
    """No hook is allowed there: policies of both groups."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    groups = {name: mesh[name].get_group() for name in ("replicate", "shard")}
    found = []
    for coded in (False, True):
        if coded:
            lc.set_policy(groups["shard"], "all_gather=minmax8:bucket=1024; reduce_scatter=qsgd8:bucket=1024")
            lc.set_policy(groups["replicate"], "all_reduce=sym8:bucket=1024")
        model = _model(r, "HYBRID_SHARD", (groups["shard"], groups["replicate"]))
        with pytest.raises(AssertionError, match="not supported for hybrid"):
            model.register_comm_hook(lc.fsdp.fsdp1.State(), lc.fsdp.fsdp1.hook)
        lc.reset_stats()
        found.append(_train(r, model)[0])
        shard, replicate = (lc.stats(groups[name])[groups[name].group_name] for name in ("shard", "replicate"))
        calls = [shard[op]["calls"] - shard[op]["exact_calls"] for op in ("all_gather", "reduce_scatter")]
        calls.append(replicate["all_reduce"]["calls"] - replicate["all_reduce"]["exact_calls"])
        assert all((n > 0) == coded for n in calls), calls
    crcs = [None] * r.size
    dist.all_gather_object(crcs, crc(model.parameters()))
    assert crcs[:2] == crcs[2:], "replicas hold other shards"
    torch.testing.assert_close(found[1], found[0], rtol=0.05, atol=0)
    assert not torch.equal(found[1], found[0])


def test_scopes_and_mistakes(r):
    r.init("lowcomm")
    with pytest.raises(ValueError, match="foo8"):
        lc.fsdp.fsdp1.State(gradients="foo8")
    with pytest.raises(ValueError, match="backend lowcomm"):
        lc.fsdp.fsdp1.State(group=dist.new_group(backend="gloo"))
    state, n = lc.fsdp.fsdp1.State(), 4096
    x = torch.randn(n * r.size, generator=torch.Generator().manual_seed(r.rank))
    parts = [torch.randn(n * r.size, generator=torch.Generator().manual_seed(q)) for q in range(r.size)]
    mean = sum(parts[1:], parts[0]) / r.size
    got = torch.empty(n)
    lc.fsdp.fsdp1.hook(state, x, got)
    want = mean[r.rank * n : (r.rank + 1) * n]
    assert 0 < (got - want).abs().max() < 0.05
    again = torch.empty(n)
    lc.fsdp.fsdp1.hook(state, x, again)
    assert not torch.equal(got, again), "a reduction reuses the draws of the one before"
    state.load_state_dict({"calls": 0})
    lc.fsdp.fsdp1.hook(state, x, again)
    assert torch.equal(got, again)
    with lc.exact():
        lc.fsdp.fsdp1.hook(state, x, got)
        whole = x.clone()
        lc.fsdp.fsdp1.hook(state, whole)
    assert torch.equal(got, want)
    assert torch.equal(whole, mean)
    lc.fsdp.fsdp1.hook(state, x.double(), got.double())
    reasons = lc.stats()[dist.group.WORLD.group_name]["reduce_scatter"]["exact_because"]
    assert reasons == {"inside lc.exact()": 1, "its dtype is torch.float64": 1}, reasons


@pytest.mark.on("pair", group={}, alike=True)
def test_mixed_precision_is_coded_as_it_is(r):
    model = _model(r, "FULL_SHARD", mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16))
    model.register_comm_hook(lc.fsdp.fsdp1.State(), lc.fsdp.fsdp1.hook)
    losses, whole = _train(r, model)
    stats = lc.stats()[dist.group.WORLD.group_name]["reduce_scatter"]
    assert stats["exact_calls"] == 0
    assert 1.9 < stats["ratio"] < 2
    assert losses[-3:].mean() < losses[0]
    return whole
