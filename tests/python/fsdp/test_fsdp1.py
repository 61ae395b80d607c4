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


def _run(r, strategy, how):
    r.init("lowcomm", pg_options=lc.Options(min_bytes=0))
    model = _model(r, strategy)
    state = None
    if how != "plain":
        weights, gradients = (WEIGHTS, GRADIENTS) if how == "coded" else ("none", "none")
        if how == "coded":
            lc.set_policy(f"all_gather={weights}")
        state = lc.fsdp.fsdp1.State(gradients=gradients)
        model.register_comm_hook(state, lc.fsdp.fsdp1.hook)
    lc.reset_stats()
    losses, whole = _train(r, model)
    return losses, whole, lc.stats()[dist.group.WORLD.group_name], state and state.state_dict()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_the_hook_codes_gradients(pair, strategy):
    plain, none, coded = (pair(_run, strategy, how) for how in ("plain", "none", "coded"))
    op = "all_reduce" if strategy == "NO_SHARD" else "reduce_scatter"
    assert torch.equal(plain[0][0], none[0][0]), "`none` is FSDP1's own arithmetic at two ranks"
    assert plain[0][1] == none[0][1] == none[1][1]
    assert coded[0][1] == coded[1][1]
    assert not torch.equal(coded[0][0], none[0][0])
    torch.testing.assert_close(coded[0][0], none[0][0], rtol=0.05, atol=0)
    stats = coded[0][2]
    assert stats[op]["exact_calls"] == 0
    assert stats[op]["ratio"] > 3.8, stats[op]
    if strategy != "NO_SHARD":
        assert coded[0][3] == {"calls": stats[op]["calls"]}
        assert stats["all_gather"]["calls"] > 0
        assert stats["all_gather"]["ratio"] > 3.5, stats["all_gather"]


def _hybrid(r, coded):
    """No hook is allowed there: policies of both groups."""
    r.init("lowcomm")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    groups = {name: mesh[name].get_group() for name in ("replicate", "shard")}
    if coded:
        lc.set_policy(groups["shard"], "all_gather=minmax8:bucket=1024; reduce_scatter=qsgd8:bucket=1024")
        lc.set_policy(groups["replicate"], "all_reduce=sym8:bucket=1024")
    model = _model(r, "HYBRID_SHARD", (groups["shard"], groups["replicate"]))
    with pytest.raises(AssertionError, match="not supported for hybrid"):
        model.register_comm_hook(lc.fsdp.fsdp1.State(), lc.fsdp.fsdp1.hook)
    losses, _ = _train(r, model)
    shard, replicate = (lc.stats(groups[name])[groups[name].group_name] for name in ("shard", "replicate"))
    calls = [shard[op]["calls"] - shard[op]["exact_calls"] for op in ("all_gather", "reduce_scatter")]
    calls.append(replicate["all_reduce"]["calls"] - replicate["all_reduce"]["exact_calls"])
    assert all((n > 0) == coded for n in calls), calls
    return losses, crc(model.parameters())


def test_hybrid_shards_by_policies(quad):
    exact, coded = quad(_hybrid, False), quad(_hybrid, True)
    crcs = [crc for _, crc in coded]
    assert crcs[:2] == crcs[2:], "replicas hold other shards"
    torch.testing.assert_close(coded[0][0], exact[0][0], rtol=0.05, atol=0)
    assert not torch.equal(coded[0][0], exact[0][0])


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


def _mixed(r):
    r.init("lowcomm")
    model = _model(r, "FULL_SHARD", mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16))
    model.register_comm_hook(lc.fsdp.fsdp1.State(), lc.fsdp.fsdp1.hook)
    losses, whole = _train(r, model)
    stats = lc.stats()[dist.group.WORLD.group_name]["reduce_scatter"]
    assert stats["exact_calls"] == 0
    assert 1.9 < stats["ratio"] < 2
    assert losses[-3:].mean() < losses[0]
    return whole


def test_mixed_precision_is_coded_as_it_is(pair):
    assert len(set(pair(_mixed))) == 1
