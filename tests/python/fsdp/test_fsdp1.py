"""FSDP1 under a policy, which codes the weights and gradients of its flat buffers, by every strategy that runs on the CPU."""

import warnings

import pytest
import torch
from fsdp_model import make_model, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import torch_lowcomm as lc

POLICY = "all_gather=minmax8:bucket=1024; reduce_scatter=qsgd8:bucket=1024; all_reduce=qsgd8:bucket=1024"


def _losses(r, strategy, mesh):
    blocks = make_model(2)
    options = {"auto_wrap_policy": ModuleWrapPolicy({type(blocks[0])}), "device_id": torch.device("cpu")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(blocks, sharding_strategy=strategy, device_mesh=mesh, **options)
        return train(r, model, 15)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
@pytest.mark.on("quad", group={"pg_options": lc.Options(min_bytes=0)})
def test_a_policy_codes_weights_and_gradients(r, strategy):
    mesh = init_device_mesh("cpu", (2, 2) if strategy == "HYBRID_SHARD" else (4,))
    case = r, ShardingStrategy[strategy], mesh
    plain = _losses(*case)
    for group in mesh.get_all_groups():
        lc.set_policy(group, POLICY)
    with lc.exact():
        assert torch.equal(_losses(*case), plain)
    lc.reset_stats()
    coded = _losses(*case)
    assert not torch.equal(coded, plain)
    torch.testing.assert_close(coded, plain, rtol=0.05, atol=0)
    counted = {
        op: figures for group in mesh.get_all_groups() for op, figures in lc.stats(group)[group.group_name].items()
    }
    assert ("all_gather" in counted) == ("reduce_scatter" in counted) == (strategy != "NO_SHARD")
    assert ("all_reduce" in counted) == (strategy in ("NO_SHARD", "HYBRID_SHARD"))
    for op, figures in counted.items():
        assert figures["exact_calls"] == 0, (op, figures)
        assert figures["ratio"] > 3.8, (op, figures)
