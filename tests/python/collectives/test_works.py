"""Works: future, result, wait with a time-out, sequence number, profiler event; many in flight; coalescing."""

import datetime
import time

import pytest
import torch
import torch.distributed as dist
from group_check import exception_of


@pytest.mark.on("pair", "quad")
def test_works(r):
    """A Work of every family: completes by itself, with a future, a result and no exception."""
    r.init("lowcomm")
    n = 1000
    ops = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(n), async_op=True),
        "broadcast": lambda: dist.broadcast(torch.ones(n), 0, async_op=True),
        "all_gather": lambda: dist.all_gather([torch.empty(n) for _ in range(r.size)], torch.ones(n), async_op=True),
        "all_gather_base": lambda: dist.all_gather_into_tensor(torch.empty(n * r.size), torch.ones(n), async_op=True),
        "reduce_scatter": lambda: dist.reduce_scatter(
            torch.empty(n), [torch.ones(n) for _ in range(r.size)], async_op=True
        ),
        "reduce_scatter_base": lambda: dist.reduce_scatter_tensor(
            torch.empty(n), torch.ones(n * r.size), async_op=True
        ),
        "send_recv": lambda: (
            sends.append(dist.isend(torch.ones(n), (r.rank + 1) % r.size))
            or dist.irecv(torch.empty(n), (r.rank - 1) % r.size)
        ),
    }
    sends = []
    for name, issue in ops.items():
        work = issue()
        deadline = time.monotonic() + 20
        while name != "send_recv" and not work.is_completed():  # gloo's p2p Works need their wait()
            assert time.monotonic() < deadline, f"{name} does not complete without wait()"
            time.sleep(0.001)
        assert work.wait() is not False, name
        assert exception_of(work) is None, name
        assert work.is_success(), name
        if name.endswith("base") or name.startswith(("reduce_scatter", "all_gather", "send_recv")):
            future = issue().get_future()
            got = future.then(lambda f: [t.clone() for t in f.value()]).wait()
            assert all(isinstance(t, torch.Tensor) for t in got) and got, name
            if name.startswith("reduce_scatter"):
                assert torch.equal(got[0], torch.full((n,), float(r.size))), name
    out = torch.empty(n)
    work = dist.reduce_scatter_tensor(out, torch.ones(n * r.size), async_op=True)
    work.wait()
    assert [t.data_ptr() for t in work.result()] == [out.data_ptr()]


def test_the_first_op_does_not_block(r):
    """The first op of a group returns at once, as every other: nobody need wait for his peers to issue theirs."""
    r.init("lowcomm", timeout_s=15)
    group = dist.new_group(timeout=datetime.timedelta(seconds=15))
    for world in (None, group):
        out = torch.empty(3 * r.size)
        mine = torch.full((3,), float(r.rank))
        token = torch.zeros(1)
        if r.rank == 0:
            work = dist.all_gather_into_tensor(out, mine, group=world, async_op=True)
            dist.send(token, 1, group=world)
        else:
            dist.recv(token, 0, group=world)
            work = dist.all_gather_into_tensor(out, mine, group=world, async_op=True)
        work.wait()
        assert torch.equal(out, torch.arange(r.size).repeat_interleave(3).float())


def test_sequence_numbers(r):
    """One more for each collective, the same on every rank, and none for a send."""
    r.init("lowcomm")
    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    start = group._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(3))
    dist.all_gather_into_tensor(torch.empty(3 * r.size), torch.ones(3))
    dist.reduce_scatter_tensor(torch.empty(3), torch.ones(3 * r.size))
    dist.reduce_scatter(torch.empty(3), [torch.ones(3)] * r.size)
    dist.broadcast(torch.ones(3), 0)
    dist.all_to_all_single(torch.empty(r.size), torch.ones(r.size))
    assert group._get_sequence_number_for_group() - start == 6
    seen = [None] * r.size
    dist.all_gather_object(seen, start)
    assert seen == [start] * r.size


def test_the_profiler_sees_own_ops(r):
    """The profiler sees each of lowcomm's own ops once, from issue to completion."""
    r.init("lowcomm")
    out, mine = torch.empty(40 * r.size), torch.empty(40)
    for asynchronous in (False, True):
        with torch.autograd.profiler.profile(record_shapes=True) as profile:
            works = [
                dist.all_gather_into_tensor(out, torch.ones(40), async_op=asynchronous),
                dist.reduce_scatter_tensor(mine, out, async_op=asynchronous),
            ]
            if asynchronous:
                for work in works:
                    work.wait()
        for title, shape in (("lowcomm:all_gather", [40]), ("lowcomm:reduce_scatter", [40 * r.size])):
            events = [e for e in profile.function_events if e.name.startswith(title)]
            assert len(events) == 1, f"{title}: {[e.name for e in profile.function_events]}"
            assert events[0].is_async
            assert events[0].input_shapes[0] == shape, events[0].input_shapes
