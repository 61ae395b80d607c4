"""Works: future, result, wait with a time-out, sequence number, profiler event; many in flight; coalescing."""

import datetime
import time

import pytest
import torch
import torch.distributed as dist
from collective_cases import values


def _works(r):
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
        assert work.exception() is None, name
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


def _failed(r, op):
    """The Work of an op that failed says so by every way of asking, on the rank at fault and on the others."""
    import torch_lowcomm as lc

    r.init("lowcomm", timeout_s=600, pg_options=lc.Options(policy=f"{op}=minmax8", min_bytes=0))
    small, big = torch.ones(1000), torch.ones(1000 * r.size)
    (small if op == "all_gather" else big)[7] = float("nan") if r.rank == 0 else 1.0
    if op == "all_gather":
        work = dist.all_gather_into_tensor(big, small, async_op=True)
    else:
        work = dist.reduce_scatter_tensor(small, big, async_op=True)
    named = pytest.raises(ValueError if r.rank == 0 else dist.DistBackendError, match="finite")
    with named:
        work.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert work.exception() is not None
    with named:
        work.wait()  # again
    with pytest.raises((ValueError, RuntimeError), match="finite"):
        work.get_future().wait()


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_a_failed_work_says_so(pair, op):
    pair(_failed, op)


def _late(r, which):
    """A wait of its own time-out fails on the rank that is early; the op itself goes on and comes out right."""
    r.init("lowcomm")
    out = torch.empty(10 * r.size)
    dist.all_gather_into_tensor(out, torch.ones(10))
    issue = {
        "all_gather": lambda: dist.all_gather_into_tensor(out, torch.full((10,), float(r.rank)), async_op=True),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(out[:10], torch.ones(10 * r.size), async_op=True),
    }[which]
    if r.rank == 0:
        work = issue()
        assert not work.is_completed()
        with pytest.raises(RuntimeError):
            work.wait(datetime.timedelta(milliseconds=50))
        r.say("waited")
        work.wait()
    else:
        r.hear("waited")
        issue().wait()
    want = (
        torch.arange(r.size).repeat_interleave(10).float()
        if which == "all_gather"
        else torch.full((10,), float(r.size))
    )
    assert torch.equal(out[: want.numel()], want)


def _first_op(r):
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


def test_the_first_op_does_not_block(pair):
    pair(_first_op)


def _sequence(r):
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
    return seen


def test_works(pair, quad):
    pair(_works)
    quad(_works)


@pytest.mark.parametrize("which", ["all_gather", "reduce_scatter"])
def test_a_wait_that_times_out_leaves_the_op_alone(pair, which):
    pair(_late, which)


def test_sequence_numbers(pair):
    seen = pair(_sequence)
    assert seen[0] == seen[1] == [seen[0][0]] * 2


def _profiled(r):
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


def test_the_profiler_sees_own_ops(pair):
    pair(_profiled)


def _many_at_once(r):
    """Ops of all kinds in flight together, waited for in another order."""
    r.init("lowcomm")
    works, checks = [], []
    for k in range(30):
        full = values(torch.float32, 50 * r.size, r.rank, k)
        out, whole = torch.empty(50), torch.empty(50 * r.size)
        total = full.clone()
        works.append(dist.reduce_scatter_tensor(out, full, async_op=True))
        works.append(dist.all_reduce(total, async_op=True))
        works.append(dist.all_gather_into_tensor(whole, full[:50].clone(), async_op=True))
        checks.append((k, out, total, whole))
    dist.barrier()
    for work in reversed(works):
        work.wait()
    for k, out, total, whole in checks:
        inputs = [values(torch.float32, 50 * r.size, q, k) for q in range(r.size)]
        want = inputs[0].clone()
        for x in inputs[1:]:
            want += x
        assert torch.equal(out, want[50 * r.rank : 50 * (r.rank + 1)]), k
        torch.testing.assert_close(total, want)
        assert torch.equal(whole, torch.cat([x[:50] for x in inputs])), k


def _coalescing_device(r):
    """The manager with a device starts and ends coalescing in the backend; collectives and p2p may mix in it."""
    r.init("lowcomm")
    right, left = (r.rank + 1) % r.size, (r.rank - 1) % r.size
    outs = torch.empty(4 * r.size), torch.empty(4), torch.empty(4)
    with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.isend(torch.full((4,), float(r.rank)), right)
        dist.irecv(outs[2], left)
    manager.wait()
    assert torch.equal(outs[2], torch.full((4,), float(left)))
    with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu")):
        dist.all_gather_into_tensor(outs[0], torch.full((4,), float(r.rank)))
    assert torch.equal(outs[0], torch.arange(r.size).repeat_interleave(4).float())
    with dist.distributed_c10d._coalescing_manager():
        pass  # nothing in it
    dist.all_reduce(outs[1].fill_(1))
    assert torch.equal(outs[1], torch.full((4,), float(r.size)))


def test_many_ops_in_flight(pair, quad):
    pair(_many_at_once)
    quad(_many_at_once)


def test_coalescing_with_a_device(pair, quad):
    pair(_coalescing_device)
    quad(_coalescing_device)
