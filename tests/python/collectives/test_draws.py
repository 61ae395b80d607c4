"""Stochastic rounding under a policy: which ops, ranks and groups draw different numbers."""

import pytest
import torch
import torch.distributed as dist
from compressed_by_hand import draw_key
from torch.distributed.device_mesh import init_device_mesh

import torch_lowcomm as lc

SPEC = "qsgd2:bucket=64"
N = 1 << 14  # over min_bytes


def _reduced(group, shared):
    out = torch.empty(N)
    dist.reduce_scatter_tensor(out, shared.repeat(dist.get_world_size(group)), group=group)
    return out


@pytest.mark.on("quad")
def test_replicas_draw_by_themselves(r):
    """Two groups of two with equal data, as replicas of HSDP: their roundings are independent."""
    r.init("lowcomm", pg_options=lc.Options(policy=f"reduce_scatter={SPEC}", min_bytes=0))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shared = torch.randn(N, generator=torch.Generator().manual_seed(5))
    shard = mesh["shard"].get_group()
    lc.set_policy(shard, f"reduce_scatter={SPEC}")
    first, second = _reduced(shard, shared), _reduced(shard, shared)
    assert not torch.equal(first, second)
    got = [torch.empty(N) for _ in range(r.size)]
    dist.all_gather(got, first)
    assert not torch.equal(got[0], got[2])
    assert not torch.equal(got[0], got[1])


@pytest.mark.on("pair", alike=True)
def test_groups_of_a_rank_draw_by_themselves(r):
    """Two groups of the same ranks at the same step; a run that does the same again draws the same."""
    options, found = lc.Options(policy=f"reduce_scatter={SPEC}", min_bytes=0), []
    shared = torch.randn(N, generator=torch.Generator().manual_seed(5))
    for _ in range(2):
        r.init("lowcomm", pg_options=options)
        other = dist.new_group(pg_options=options)
        own, others = lc.groups.backend_of(None), lc.groups.backend_of(other)
        assert own.draw_key == draw_key(0, dist.group.WORLD) != others.draw_key == draw_key(0, other)
        while own._get_sequence_number_for_group() > others._get_sequence_number_for_group():
            dist.barrier(group=other)
        found.append((_reduced(dist.group.WORLD, shared), _reduced(other, shared), own.draw_key))
        dist.destroy_process_group()
    (mine, theirs, key), (again, _, same) = found
    assert not torch.equal(mine, theirs) and torch.equal(mine, again) and key == same
    return key


@pytest.mark.parametrize("small_first", [False, True])
def test_a_coalesced_op_is_coded_as_one(r, small_first):
    """min_bytes counts what a rank puts into the op, in whatever order its tensors come."""
    r.init("lowcomm", pg_options=lc.Options(policy="all_gather=minmax8", min_bytes=65536))
    sizes = [16, 1 << 18] if small_first else [1 << 18, 16]
    ones = [torch.rand(n) for n in sizes]
    for mixed in (False, True):
        # Within one op every tensor is judged by itself, whatever came before it.
        inputs = [x.int() if mixed and x.numel() == 16 else x for x in ones]
        outs = [torch.empty(x.numel() * r.size, dtype=x.dtype) for x in inputs]
        before = lc.stats(dist.group.WORLD)[dist.group.WORLD.group_name].get("all_gather", {"wire_bytes": 0})
        with dist._coalescing_manager(async_ops=False):
            for out, x in zip(outs, inputs, strict=True):
                dist.all_gather_into_tensor(out, x)
        stats = lc.stats(dist.group.WORLD)[dist.group.WORLD.group_name]["all_gather"]
        sent = stats["wire_bytes"] - before["wire_bytes"]
        assert sent < (r.size - 1) * (1 << 18) * 1.1, sent
    calls, exact, because = stats["calls"], stats["exact_calls"], stats["exact_because"]
    assert (calls, exact) == (2, 0)
    assert because == {"dtype Int": 1}


def test_slots_do_not_come_around(r):
    """However many slots are given out, no two draw alike, and FORMAT.md says by what."""
    from torch_lowcomm import _C

    r.init("lowcomm")
    backend = lc.groups.backend_of(None)
    layout = _C.Layout([(0, N, SPEC)])
    backend.agree_layouts([("a layout", layout)])
    x = torch.randn(N, generator=torch.Generator().manual_seed(5))
    seen = []
    for _ in range(4):
        slot = backend.reserve_slots(2**15)
        out = torch.empty(N * r.size)
        backend.all_gather_layout(out, x, layout, slot=slot, step=3).wait()
        assert not any(torch.equal(out, other) for other in seen), slot
        seen.append(out)
        seed = (draw_key(0) + (slot >> 16) * 0x9E3779B97F4A7C15) % 2**64
        for rank, part in enumerate(out.chunk(r.size)):
            stream = (rank << 16) + slot % 2**16
            assert torch.equal(part, lc.codec(SPEC).roundtrip(x, seed=seed, stream=stream, step=3)), (slot, rank)
