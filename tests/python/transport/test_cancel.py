"""Ops that one rank gives up, in real processes: they fail on all ranks, the group lives, and the next op is right."""

import pytest
import torch
import torch.distributed as dist

import torch_lowcomm as lc

DEADLINE_S = 90.0
OPS = ("all_reduce", "all_gather", "reduce_scatter")
POLICY = "all_reduce=sym4; all_gather=minmax8; reduce_scatter=sym8"  # codes that are the same every time


def _issue(r, op, mine):
    """The Work of an op on seeded values, and where its result comes."""
    if op == "all_reduce":
        result = mine.clone()
        return dist.all_reduce(result, async_op=True), result
    if op == "all_gather":
        result = torch.empty(mine.numel() * r.size)
        return dist.all_gather_into_tensor(result, mine, async_op=True), result
    result = torch.empty(mine.numel() // r.size)
    return dist.reduce_scatter_tensor(result, mine, async_op=True), result


def _result(r, op, mine):
    work, result = _issue(r, op, mine)
    work.wait()
    return result


@pytest.mark.parametrize("policy", ["", POLICY])
@pytest.mark.on("pair", "quad", timeout=DEADLINE_S)
def test_collectives(r, policy):
    r.init("lowcomm", pg_options=lc.Options(policy=policy, min_bytes=0, connections=2))
    store = dist.distributed_c10d._get_default_store()
    mine = torch.linspace(-1, 1, 60_000 * r.size) * (r.rank + 1)
    once = {op: _result(r, op, mine) for op in OPS}
    for op in OPS:
        for by in range(r.size):
            # One rank comes when the op has failed on all others: none of them can have ended it without that rank.
            late = (by + 1) % r.size
            if r.rank == late:
                store.wait([f"{op} by {by} failed on {other}" for other in range(r.size) if other != late])
            work, _ = _issue(r, op, mine)
            if r.rank == by:
                assert lc.cancel(work, why="nobody needs it")
            with pytest.raises(dist.DistBackendError, match=rf"{op}.* was given up by rank {by} .*: nobody needs it"):
                work.wait()
            store.set(f"{op} by {by} failed on {r.rank}", "")
            assert not lc.cancel(work)
            for next_op in OPS:
                assert torch.equal(_result(r, next_op, mine), once[next_op]), (op, by, next_op)
    failed = [entry for entry in lc.flight_record()[dist.group.WORLD.group_name]["ops"] if entry["state"] == "failed"]
    assert failed and all("was given up by rank" in entry["error"] for entry in failed)
    dist.destroy_process_group()


@pytest.mark.on("pair", timeout=DEADLINE_S)
def test_error_feedback_is_not_touched(r):
    """A sum with error feedback that is given up leaves the residual as it was."""
    r.init("lowcomm", pg_options=lc.Options())
    store = dist.distributed_c10d._get_default_store()
    residual = lc.Residual(torch.empty(50_000))
    for step in range(2):
        values = torch.linspace(-1, 1, 50_000) ** (step + 1) * (r.rank + 1)
        before = residual.value.clone()
        if r.rank == 0:
            store.wait([f"given up {step}"])
        work = lc.all_reduce(values.clone(), codec="sym4", residual=residual, async_op=True)
        if r.rank == 1:
            lc.cancel(work)
            store.set(f"given up {step}", "")
        with pytest.raises(dist.DistBackendError, match="was given up by rank 1 .*: its program cancelled it"):
            work.wait()
        assert torch.equal(residual.value, before)
        lc.all_reduce(values, codec="sym4", residual=residual)
        assert not torch.equal(residual.value, before)
    dist.destroy_process_group()


@pytest.mark.on("pair", timeout=DEADLINE_S)
def test_messages_between_two_ranks(r):
    """Each end gives up a message before the other end posts it; the next one of the tag is right."""
    r.init("lowcomm", pg_options=lc.Options(policy="p2p=sym4", min_bytes=0))
    store = dist.distributed_c10d._get_default_store()
    name, peer = ("send", "recv")[r.rank], 1 - r.rank
    for by in (0, 1):
        mine = [torch.linspace(-1, 1, 300_000) * (k + 1) * peer for k in range(2)]
        if r.rank != by:
            store.wait([f"given up by {by}"])
        works = [(dist.irecv if r.rank else dist.isend)(tensor, peer, tag=5) for tensor in mine]
        if r.rank == by:
            assert lc.cancel(works[0], why="a newer one")
            store.set(f"given up by {by}", "")
        with pytest.raises(dist.DistBackendError, match=f"{name} with tag 5 was given up by rank {by}.*: a newer one"):
            works[0].wait()
        works[1].wait()
        assert all(work.is_completed() and not lc.cancel(work) for work in works)
        torch.testing.assert_close(mine[1], 2 * torch.linspace(-1, 1, 300_000), atol=0.4, rtol=0)
    if r.rank == 1:
        work = dist.irecv(torch.empty(100), tag=9)  # from any rank
        assert lc.cancel(work, why="nobody came")
        with pytest.raises(dist.DistBackendError, match="from any rank was given up by rank 1 .*: nobody came"):
            work.wait()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.on("pair", timeout=DEADLINE_S)
def test_what_cannot_be_given_up_is_refused(r):
    """By name, before anything is done."""
    r.init("lowcomm")
    with pytest.raises(TypeError, match="expected a Work, .*got int"):
        lc.cancel(3)
    plain = dist.new_group(backend="gloo")
    work = dist.all_reduce(torch.ones(2), group=plain, async_op=True)
    with pytest.raises(TypeError, match="expected the Work of one op that lowcomm carries"):
        lc.cancel(work)
    work.wait()
    dist.destroy_process_group()
