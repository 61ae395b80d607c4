"""lc.SubspaceAdamW over several processes: stages that clip together, and weights that FSDP2 shards."""

import copy

import pytest
import subspace_adam_model as small
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from diloco_model import differing
from fsdp_model import whole
from subspace_adam_model import backward, fresh
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import torch_lowcomm as lc

SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.98), "weight_decay": 0.1}
CLIP = 0.1


def _cut(model, index, count):
    """A stage's blocks, with the embedding in the first and the head in the last."""
    per = len(model.blocks) // count
    parts = nn.ModuleDict({"blocks": nn.ModuleList(model.blocks[index * per : (index + 1) * per])})
    if index == 0:
        parts["embedding"] = model.embedding
    if index == count - 1:
        parts["head"] = model.head
    return parts


@pytest.mark.on("quad", group={})
def test_stages_are_one_process(r):
    """20 steps with clipping: a stage's weights have the bits of those of one process with the same gradients."""
    whole, model = (fresh(torch.float32, blocks=2 * r.size) for _ in range(2))
    stage = _cut(model, r.rank, r.size)
    one = lc.SubspaceAdamW(whole, **SETTINGS)
    optimizer = lc.SubspaceAdamW(stage, **SETTINGS)
    clipped = 0
    for step in range(20):
        backward(whole, step)
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            p.grad = q.grad.clone()
        norm = one.clip_grad_norm(CLIP)
        assert torch.equal(optimizer.clip_grad_norm(CLIP, stages=dist.group.WORLD), norm)
        clipped += norm.item() > CLIP
        one.step()
        optimizer.step()
        one.zero_grad()
        optimizer.zero_grad()
    assert clipped > 15
    mine = [p.detach() for p in stage.parameters()]
    same = [p.detach() for p in _cut(whole, r.rank, r.size).parameters()]
    assert not differing(mine, same)
    # One stage's gradient is not finite: a gradient scaler skips the step on all.
    backward(model, 0)
    if r.rank == 1:
        next(stage.parameters()).grad[0, 0] = torch.nan
    before = [p.clone() for p in mine]
    assert optimizer.clip_grad_norm(CLIP, stages=dist.group.WORLD).isnan()
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    assert not differing(mine, before)


def _sharded(dtype, mesh, variant="rows", seed=7):
    model = fresh(dtype, seed=seed)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, lc.SubspaceAdamW(model, variant=variant, check_every=5, **SETTINGS)


def _train(model, optimizer, steps):
    for step in steps:
        backward(model, step)
        optimizer.clip_grad_norm(CLIP)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("dtype", "variant"), [(torch.float64, "project_all"), (torch.float32, "rows")], ids=str)
@pytest.mark.on("pair", group={})
def test_shards_are_one_process(r, dtype, variant):
    mesh = init_device_mesh("cpu", (r.size,))
    model, optimizer = _sharded(dtype, mesh, variant)
    plain = fresh(dtype)
    one = lc.SubspaceAdamW(plain, variant=variant, **SETTINGS)
    for step in range(20):
        for net in (model, plain):
            backward(net, step)
        mine, theirs = optimizer.clip_grad_norm(CLIP), one.clip_grad_norm(CLIP)
        torch.testing.assert_close(mine, theirs, rtol=1e-12 if dtype == torch.float64 else 1e-5, atol=0)
        for other in (optimizer, one):
            other.step()
            other.zero_grad()
    tolerance = {"rtol": 0, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 2e-5}
    for name, value in whole(model).items():
        torch.testing.assert_close(value, dict(plain.named_parameters())[name].detach(), **tolerance)
    assert max(optimizer.distances().values()) < (1e-13 if dtype == torch.float64 else 1e-5)
    down = optimizer.state[model.blocks[0].down.weight]
    assert isinstance(down["exp_avg"], DTensor)
    assert down["exp_avg"].shape[0] == (small.RANK if variant == "rows" else small.WIDTH)
    assert all(figures["exact_calls"] == figures["calls"] for ops in lc.stats().values() for figures in ops.values())


def _one_process(model, optimizer, plain):
    """Five steps of both are the same weights."""
    one = lc.SubspaceAdamW(plain, **SETTINGS)
    _train(model, optimizer, range(5))
    _train(plain, one, range(5))
    for name, value in whole(model).items():
        torch.testing.assert_close(value, dict(plain.named_parameters())[name].detach(), rtol=0, atol=1e-12)


@pytest.mark.on("trio", group={})
def test_uneven_shards(r):
    """Shards of 24 rows on 3 ranks, of 50 too, and of 4 rows, which leave a rank without any."""
    torch.manual_seed(7)
    model = small.Decoder(small.Basis(4, 2), width=4, hidden=7)
    plain = copy.deepcopy(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (r.size,)))
    _one_process(model, lc.SubspaceAdamW(model, **SETTINGS), plain)


@pytest.mark.on("quad", group={})
def test_replicas_of_shards(r):
    """HSDP: two replicas of two shards; W_p1, W_p2 and T_S are sums over the shards of one replica."""
    _one_process(*_sharded(torch.float64, init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))), fresh())


@pytest.mark.on("pair", group={})
def test_shards_of_coordinates(r):
    """FSDP2 shards coordinates along the inputs of a linear module, and an embedding's along its tokens."""
    mesh = init_device_mesh("cpu", (r.size,))
    model, plain = lc.subspace.reparam(fresh()), fresh()
    along_k = lc.subspace.reparam(fresh())
    fully_shard(along_k, mesh=mesh)
    with pytest.raises(ValueError, match="out.coordinates: expected coordinates that are not sharded in dimension 0"):
        lc.SubspaceAdamW(along_k)
    of_linears = {block_part.coordinates for block in model.blocks for block_part in (block.out, block.down)}
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p in of_linears else None)
    optimizer, one = lc.SubspaceAdamW(model, **SETTINGS), lc.SubspaceAdamW(plain, **SETTINGS)
    _train(model, optimizer, range(5))
    _train(plain, one, range(5))
    down = model.blocks[0].down.coordinates
    assert down.to_local().shape == (small.RANK, small.HIDDEN // r.size)
    assert optimizer.state[down]["exp_avg"].shape == (small.RANK, small.HIDDEN)
    assert optimizer.state[model.blocks[0].out.coordinates]["exp_avg"].shape == (small.WIDTH, small.WIDTH)
    torch.testing.assert_close(
        small.vectors().T @ down.full_tensor(), plain.blocks[0].down.weight, rtol=0, atol=1e-12, check_dtype=True
    )
    torch.testing.assert_close(model.head.weight.full_tensor(), plain.head.weight, rtol=0, atol=1e-12)


@pytest.mark.on("pair", group={})
def test_checkpoints_of_shards(r):
    """By distributed checkpoints with the same bits, and from two ranks to one process."""
    mesh = init_device_mesh("cpu", (r.size,))
    model, optimizer = _sharded(torch.float32, mesh)
    _train(model, optimizer, range(5))
    dcp.save(
        {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)},
        checkpoint_id=r.path("dcp"),
    )
    _train(model, optimizer, range(5, 10))
    want = whole(model)
    again, other = _sharded(torch.float32, mesh, seed=8)
    kept = {"model": again.state_dict(), "optimizer": get_optimizer_state_dict(again, other)}
    dcp.load(kept, checkpoint_id=r.path("dcp"))
    again.load_state_dict(kept["model"])
    set_optimizer_state_dict(again, other, kept["optimizer"])
    _train(again, other, range(5, 10))
    assert not differing(whole(again), want)

    alone = fresh(torch.float32, seed=8)
    one = lc.SubspaceAdamW(alone)
    kept = {"model": alone.state_dict(), "optimizer": get_optimizer_state_dict(alone, one)}
    dcp.load(kept, checkpoint_id=r.path("dcp"))
    alone.load_state_dict(kept["model"])
    set_optimizer_state_dict(alone, one, kept["optimizer"])
    _train(alone, one, range(5, 10))
    for name, p in alone.named_parameters():
        torch.testing.assert_close(p.detach(), want[name], rtol=1e-4, atol=2e-5)


@pytest.mark.on("pair", group={})
def test_shards_that_are_refused(r):
    model, _ = _sharded(torch.float64, init_device_mesh("cpu", (r.size,)))
    with pytest.raises(ValueError, match="embedding.weight: expected a weight that is not sharded yet, got a DTensor"):
        lc.subspace.reparam(model)
    # A shard that is moved out of S is found on all ranks.
    if r.rank == 1:
        with torch.no_grad():
            model.blocks[0].out.weight.to_local().mul_(1.1)
    with pytest.raises(ValueError, match="blocks.0.out.weight: expected a weight in the subspace"):
        lc.SubspaceAdamW(model)
