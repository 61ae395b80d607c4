"""Every op of c10d is lowcomm's own, or is refused by name: no group of gloo is made."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from collective_cases import rooted


@pytest.mark.on("pair", "trio")
def test_receives_from_any_rank(r):
    """Every rank's messages reach a receive that names nobody, with the sender's rank; those of another tag stay apart."""
    r.init("lowcomm", timeout_s=30.0)
    count = 20
    if r.rank > 0:
        for k in range(count):
            dist.send(torch.full((3,), 100.0 * r.rank + k), 0, tag=k % 2)
    else:
        seen = {rank: [0, 1] for rank in range(1, r.size)}
        for k in range(count * (r.size - 1)):
            got, tag = torch.empty(3), (k // (r.size - 1)) % 2
            rank = dist.recv(got, tag=tag)
            assert got.tolist() == [100.0 * rank + seen[rank][tag]] * 3
            seen[rank][tag] += 2
    # Asynchronous, two at a time, and then one by name, whose message must not be there before: it would meet one of them.
    if r.rank == 0:
        got = [torch.empty(2) for _ in range(r.size)]
        works = [dist.irecv(t) for t in got[:-1]]
        for work in works:
            work.wait()
        dist.barrier()
        assert sorted(work._source_rank() for work in works) == list(range(1, r.size))
        assert all(t[0] == work._source_rank() for t, work in zip(got, works, strict=False))
        dist.recv(got[-1], src=r.size - 1)
    else:
        dist.send(torch.full((2,), float(r.rank)), 0)
        dist.barrier()
        if r.rank == r.size - 1:
            dist.send(torch.zeros(2), 0)
    dist.barrier()
    stats = dist.group.WORLD._get_backend(torch.device("cpu")).stats()
    assert stats["barrier"]["exact_calls"] == 2 and stats["barrier"]["wire_bytes"] > 0
    if r.rank == 0:
        assert stats["recv"]["calls"] == count * (r.size - 1) + r.size and stats["recv"]["wait_s"] > 0
    dist.destroy_process_group()


@pytest.mark.on("trio")
def test_what_is_built_of_ops(r):
    """Objects, coalesced ops and sparse tensors, which c10d makes of collectives."""
    r.init("lowcomm", timeout_s=30.0)
    gathered = [None] * r.size
    dist.all_gather_object(gathered, {"rank": r.rank, "text": "x" * (10**r.rank)})
    assert [g["rank"] for g in gathered] == list(range(r.size))
    mine = [None]
    dist.scatter_object_list(mine, [("to", k) for k in range(r.size)] if r.rank == 1 else None, src=1)
    assert mine == [("to", r.rank)]
    several = [r.rank if r.rank == 0 else None, "same" if r.rank == 0 else None]
    dist.broadcast_object_list(several)
    assert several == [0, "same"]
    heap = [None] * r.size if r.rank == 0 else None
    dist.gather_object(r.rank**2, heap)
    assert heap is None or heap == [k * k for k in range(r.size)]

    tensors = [torch.ones(3, dtype=torch.bfloat16), torch.arange(4)]
    with dist._coalescing_manager():
        for t in tensors:
            dist.all_reduce(t)
    assert tensors[0].tolist() == [r.size] * 3 and tensors[1].tolist() == [r.size * k for k in range(4)]

    # Sparse: with a dense dimension, equal and different places, none on one rank.
    rows = [0, 2] if r.rank == 0 else [2, 2, r.rank]
    rows = [] if r.rank == 2 else rows
    t = torch.sparse_coo_tensor(torch.tensor([rows], dtype=torch.int64), torch.ones(len(rows), 3), (5, 3))
    want = t.to_dense()
    dist.all_reduce(want)
    dist.all_reduce(t)
    assert t.is_sparse and t.is_coalesced() and torch.equal(t.to_dense(), want)

    dist.barrier()
    dist.destroy_process_group()


def test_what_is_not_carried_is_named(r):
    """What is not carried is named, on the rank that asks, and the group goes on."""
    r.init("lowcomm", timeout_s=30.0)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    for dtype in (torch.int16, torch.float8_e4m3fn):
        with pytest.raises(NotImplementedError, match="all_reduce .* expected what lowcomm carries"):
            dist.all_reduce(torch.zeros(3).to(dtype))
    with pytest.raises(NotImplementedError, match="reduce_scatter .* float32"):
        dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(2 * r.size), op=dist.ReduceOp.BXOR)
    with pytest.raises(NotImplementedError, match="reduce .* float32"):
        dist.reduce(torch.zeros(2), 0, op=dist.ReduceOp.BAND)
    with pytest.raises(NotImplementedError, match="gather .*got 2 tensors"):
        backend.gather([[]], [torch.zeros(2), torch.zeros(2)])
    with pytest.raises(ValueError, match="expected a root among"):
        backend.scatter([torch.zeros(2)], [[torch.zeros(2)] * r.size], opts=rooted(dist.ScatterOptions(), 7))
    with pytest.raises(ValueError, match="scatter: expected inputs of 2 elements"):
        backend.scatter([torch.zeros(2)], [[torch.zeros(3)] * r.size], opts=rooted(dist.ScatterOptions(), r.rank))
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [r.size] * 2
    dist.destroy_process_group()


@pytest.mark.on(3, timeout=90.0)
def test_a_monitored_barrier_names_who_is_missing(r):
    """On all ranks that came."""
    r.init("lowcomm", timeout_s=30.0)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend.monitored_barrier(timedelta(seconds=20))
    if r.rank == 2:
        for other in range(2):
            r.hear(f"{other} has given up")
        return
    want = "Rank 2 failed to pass monitoredBarrier in 1000 ms"
    with pytest.raises(dist.DistBackendError, match=want):
        backend.monitored_barrier(timedelta(seconds=1))
    r.say(f"{r.rank} has given up")


def test_a_group_adds_few_threads(r):
    before = len(os.listdir("/proc/self/task"))
    r.init("lowcomm", timeout_s=30.0)
    dist.all_reduce(torch.ones(4))
    dist.barrier()
    added = len(os.listdir("/proc/self/task")) - before
    # The group's worker, the endpoint's thread, and torch's store's where the fixture makes one.
    assert added <= 3
    dist.destroy_process_group()
