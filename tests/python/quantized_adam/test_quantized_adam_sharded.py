"""lc.QuantizedAdam over replicas whose model FSDP2 shards: each rank averages its shard with the same shard of the others."""

import copy

import ddp_model
import pytest
import torch
import torch.distributed as dist
from diloco_model import differing, train
from fsdp_model import whole
from test_quantized_adam import SETTINGS
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torch_lowcomm as lc

WARM = 4


def _sharded(mesh):
    torch.manual_seed(7)
    model = ddp_model.Net()
    fully_shard(model, mesh=mesh["shard"])
    optimizer = lc.QuantizedAdam(
        model.named_parameters(), **SETTINGS, warmup_steps=WARM, group=mesh.get_group("replica")
    )
    return model, optimizer


@pytest.mark.on("quad")
def test_each_shard_is_averaged_with_its_replicas(r):
    r.init()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model, optimizer = _sharded(mesh)
    train(model, optimizer, r.rank, range(WARM))

    torch.manual_seed(7)
    plain = ddp_model.Net()
    adamw = torch.optim.AdamW(plain.parameters(), **SETTINGS)
    for step in range(WARM):  # the mean of all four ranks' gradients, as FSDP2 and the replicas average them
        for rank in range(4):
            x, y = ddp_model.batch(rank, step)
            ((plain(x, spare=True) - y).square().mean() / 4).backward()
        adamw.step()
        adamw.zero_grad()
    for name, value in whole(model).items():
        torch.testing.assert_close(value, dict(plain.named_parameters())[name], rtol=1e-4, atol=1e-6)

    losses = train(model, optimizer, r.rank, range(WARM, 40))
    assert sum(losses[-5:]) < sum(losses[:5])
    everywhere = [None] * 4
    dist.all_gather_object(everywhere, whole(model))
    assert not any(differing(everywhere[0], other) for other in everywhere), "replicas and shards agree to the bit"
    (first, *_) = optimizer.state.values()
    assert isinstance(first["exp_avg"], DTensor)

    state = get_optimizer_state_dict(model, optimizer)
    copied, weights = copy.deepcopy(state), copy.deepcopy(model.state_dict())
    train(model, optimizer, r.rank, range(40, 45))
    want = whole(model)
    other, again = _sharded(mesh)
    other.load_state_dict(weights)
    set_optimizer_state_dict(other, again, copied)
    train(other, again, r.rank, range(40, 45))
    assert not differing(whole(other), want), "a checkpoint goes on with the same bits"
    calls = lc.stats()[mesh.get_group("replica").group_name]
    assert calls["quantized_adam"]["calls"] > 0
    assert calls["quantized_adam"]["wire_bytes"] < calls["quantized_adam"]["raw_bytes"] / 3
