"""Code that runs when an op has ended: callbacks of futures, which may wait for further ops, and who is told what and when."""

import time

import pytest
import torch
import torch.distributed as dist

import torch_lowcomm as lc

N = 1000


def _gather(n=N, value=1.0, **kwargs):
    out = torch.empty(n * dist.get_world_size())
    return out, dist.all_gather_into_tensor(out, torch.full((n,), value), **kwargs)


@pytest.mark.parametrize("inner", ["collective", "future", "barrier", "nested"])
def test_a_callback_may_wait_for_the_next_op(r, inner):
    """A callback that waits for another op of its group: torch's own quantization hooks do."""
    r.init("lowcomm", timeout_s=20)

    def follow(future):
        future.value()
        if inner == "collective":
            return _gather(value=2.0)[0]
        if inner == "future":
            out, work = _gather(value=2.0, async_op=True)
            work.get_future().wait()
            return out
        if inner == "barrier":
            dist.barrier()
        else:
            # Three deep, each waiting for the next.
            out, work = _gather(value=2.0, async_op=True)
            return work.get_future().then(lambda _: _gather(value=3.0)[0] - 1.0).wait()
        return torch.full((N * r.size,), 2.0)

    first, work = _gather(async_op=True)
    second = work.get_future().then(follow).wait()
    assert torch.equal(first, torch.ones(N * r.size))
    assert torch.equal(second, torch.full((N * r.size,), 2.0))
    dist.barrier()


def test_a_callback_may_destroy_its_group(r):
    r.init("lowcomm", timeout_s=20)
    _, work = _gather(async_op=True)
    work.get_future().then(lambda _: dist.destroy_process_group()).wait()
    assert not dist.is_initialized()
    r.init("lowcomm", timeout_s=20)
    assert torch.equal(_gather()[0], torch.ones(N * r.size))


def test_a_future_outlives_its_work(r):
    """The future of a receive is kept, its Work is not: nobody waits where the Work is dropped."""
    r.init("lowcomm", timeout_s=20)
    peer = 1 - r.rank
    got = torch.zeros(N)
    future = dist.irecv(got, peer).get_future()
    dist.send(torch.full((N,), float(r.rank)), peer)
    (tensor,) = future.wait()
    assert torch.equal(tensor, torch.full((N,), float(peer)))
    # One that never comes ends with its group.
    lonely = dist.irecv(got, peer).get_future()
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(RuntimeError):
        lonely.wait()


@pytest.mark.on("pair", "quad")
def test_completion_means_the_result_is_there(r):
    """The stand-in for a non-contiguous tensor is copied back before the Work calls itself complete."""
    r.init("lowcomm", timeout_s=20)
    whole = torch.zeros(2 * N)
    view = whole[::2]
    view += r.rank + 1
    work = dist.all_reduce(view, async_op=True)
    end = time.monotonic() + 20
    while not work.is_completed():
        assert time.monotonic() < end
        time.sleep(0.0005)
    total = float(r.size * (r.size + 1) // 2)
    assert torch.equal(view, torch.full((N,), total))
    assert torch.equal(whole[1::2], torch.zeros(N))
    work.wait()
    assert torch.equal(view, torch.full((N,), total))


def test_an_exact_scope_closed_elsewhere(r):
    """`lc.exact()` held by a generator that another thread closes: neither thread keeps it, nor loses its own."""
    import threading

    from torch_lowcomm import _C

    def held():
        with lc.exact():
            yield

    def elsewhere():
        generator.close()
        with lc.exact():
            seen.append(_C.in_exact())
        seen.append(_C.in_exact())

    seen = []
    generator = held()
    next(generator)
    assert _C.in_exact()
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [True, False]
    assert not _C.in_exact()
    with lc.exact(), lc.exact():
        assert _C.in_exact()
