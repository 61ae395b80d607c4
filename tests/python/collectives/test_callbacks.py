"""Code that runs when an op has ended: callbacks of futures, which may wait for further ops, and who is told what and when."""

import time

import pytest
import torch
import torch.distributed as dist

N = 1000


def _gather(n=N, value=1.0, **kwargs):
    out = torch.empty(n * dist.get_world_size())
    return out, dist.all_gather_into_tensor(out, torch.full((n,), value), **kwargs)


def _waits_in_a_callback(r, inner):
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


@pytest.mark.parametrize("inner", ["collective", "future", "barrier", "nested"])
def test_a_callback_may_wait_for_the_next_op(pair, inner):
    pair(_waits_in_a_callback, inner)


def _destroys_in_a_callback(r):
    r.init("lowcomm", timeout_s=20)
    _, work = _gather(async_op=True)
    work.get_future().then(lambda _: dist.destroy_process_group()).wait()
    assert not dist.is_initialized()
    r.init("lowcomm", timeout_s=20)
    assert torch.equal(_gather()[0], torch.ones(N * r.size))


def test_a_callback_may_destroy_its_group(pair):
    pair(_destroys_in_a_callback)


def _future_outlives_its_work(r):
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


def test_a_future_outlives_its_work(pair):
    pair(_future_outlives_its_work)


def _batch(r):
    """The future of several ops is of their tensors."""
    r.init("lowcomm", timeout_s=20)
    peer = 1 - r.rank
    got = torch.zeros(N)
    ops = [dist.P2POp(dist.isend, torch.full((N,), 1.0 + r.rank), peer), dist.P2POp(dist.irecv, got, peer)]
    works = dist.batch_isend_irecv(ops)
    tensors = works[-1].get_future().wait()
    assert all(isinstance(t, torch.Tensor) for t in tensors)
    assert any(t.data_ptr() == got.data_ptr() for t in tensors)
    assert torch.equal(got, torch.full((N,), 1.0 + peer))
    for work in works:
        work.wait()
        assert work.exception() is None


def test_the_future_of_a_batch_is_of_tensors(pair):
    pair(_batch)


def _polled(r):
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


def test_completion_means_the_result_is_there(pair, quad):
    pair(_polled)
    quad(_polled)


def _open_block(r):
    """An exception inside a coalescing block, which torch then never ends."""
    r.init("lowcomm", timeout_s=20)
    peer = 1 - r.rank
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    lost = torch.zeros(3)
    backend._start_coalescing()
    backend.recv([lost], peer, 7)  # and here something raises

    # Plain sends and receives go on, as do later blocks.
    got = torch.zeros(N)
    if r.rank == 0:
        dist.send(torch.ones(N), peer)
        dist.recv(got, peer)
    else:
        dist.recv(got, peer)
        dist.send(torch.ones(N), peer)
    assert torch.equal(got, torch.ones(N))
    for value in (2.0, 3.0):
        ops = [dist.P2POp(dist.irecv, got, peer), dist.P2POp(dist.isend, torch.full((N,), value), peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert torch.equal(got, torch.full((N,), value))
    assert torch.equal(lost, torch.zeros(3))


def test_an_exception_in_a_coalescing_block_costs_that_block_alone(pair):
    pair(_open_block)


def _scope_of_a_generator(r):
    """`lc.exact()` held by a generator that another thread closes: neither thread keeps it, nor loses its own."""
    import threading

    import torch_lowcomm as lc
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


def test_an_exact_scope_closed_elsewhere(pair):
    pair(_scope_of_a_generator)
