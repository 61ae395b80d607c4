"""send and recv under a policy: values, draws, orders that must not block, batches, Works."""

import datetime
import threading
import time

import pytest
import ranks
import torch
import torch.distributed as dist
from collective_cases import values
from compressed_by_hand import draw_key
from group_check import exception_of
from p2p_cases import FLOATS, init, neighbours, same, send_in_turn, stats, swap

import torch_lowcomm as lc


def _values(r):
    codec = init(r)
    right, left = neighbours(r)
    for dtype in FLOATS:
        for n in (0, 1, 1025, 300_007):
            mine, theirs = values(dtype, n, r.rank), values(dtype, n, left)
            kept, got = mine.clone(), torch.zeros_like(mine)
            swap(r, mine, got)
            same(got, codec.roundtrip(theirs), (dtype, n))
            same(mine, kept, "a send does not write")
    send_in_turn(r, 3333, codec.roundtrip)
    # Strided tensors on both sides.
    whole = values(torch.float32, 600 * 700, r.rank).view(600, 700)
    got = torch.zeros(700, 600)
    works = [dist.irecv(got.t(), left), dist.isend(whole.t().contiguous().t(), right)]
    for work in works:
        work.wait()
    same(got.t().contiguous(), codec.roundtrip(values(torch.float32, 600 * 700, left).view(600, 700)))
    kinds = {kind: s["exact_calls"] for kind, s in stats().items()}
    assert kinds == {"send": 0, "recv": 0}, kinds


def _draws(r):
    """Each message of a rank draws by a step of its own, whoever gets it."""
    codec = init(r, "qsgd4:bucket=256")
    x = values(torch.float32, 100_000, 0)
    for k in range(3):
        for peer in range(r.size):
            for sender in range(r.size):
                if sender == peer:
                    continue
                if r.rank == sender:
                    dist.send(x, peer)
                elif r.rank == peer:
                    got = torch.empty_like(x)
                    dist.recv(got, sender)
                    # The sender's messages before: k whole turns, then those to lower ranks.
                    nth = k * (r.size - 1) + peer - (sender < peer)
                    want = codec.roundtrip(x, seed=draw_key(), stream=sender << 16, step=2**31 + nth)
                    same(got, want, (k, sender, peer))


def _batches(r):
    codec = init(r)
    right, left = neighbours(r)
    for n, dtype in ((0, torch.float32), (5, torch.bfloat16), (300_007, torch.float32)):
        for receives_first in (True, False):
            outs = [torch.zeros(n, dtype=dtype) for _ in range(3)]
            receives = [dist.P2POp(dist.irecv, t, left, tag=k) for k, t in enumerate(outs)]
            sends = [dist.P2POp(dist.isend, values(dtype, n, r.rank, k), right, tag=k) for k in range(3)]
            for work in dist.batch_isend_irecv(receives + sends if receives_first else sends + receives):
                work.wait()
            for k, t in enumerate(outs):
                same(t, codec.roundtrip(values(dtype, n, left, k)), (n, receives_first, k))
    # Coded and exact messages in one batch; order alone pairs equal tags.
    floats, integers = [torch.zeros(999) for _ in range(2)], torch.zeros(7, dtype=torch.int64)
    ops = [dist.P2POp(dist.isend, values(torch.float32, 999, r.rank, k), right) for k in range(2)]
    ops += [dist.P2POp(dist.isend, torch.full((7,), r.rank), right)]
    ops += [dist.P2POp(dist.irecv, t, left) for t in (*floats, integers)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert (integers == left).all()
    for k, t in enumerate(floats):
        same(t, codec.roundtrip(values(torch.float32, 999, left, k)))
    # A NaN fails its own message, on both sides: the others of the batch arrive, and it can be sent again.
    out, second = torch.zeros(5000), torch.zeros(5000)
    mine = values(torch.float32, 5000, r.rank)
    spoilt = mine.clone()
    spoilt[4999] = float("nan")
    works = [dist.irecv(out, left), dist.irecv(second, left), dist.isend(spoilt, right), dist.isend(mine, right)]
    reason = "expected finite elements.*got nan at element 4999"
    with pytest.raises(dist.DistBackendError, match=f"could not send its part: rank {left}.*{reason}"):
        works[0].wait()
    with pytest.raises(ValueError, match=reason):
        works[2].wait()
    works[1].wait()
    works[3].wait()
    same(second, codec.roundtrip(values(torch.float32, 5000, left)))
    with pytest.raises((ValueError, dist.DistBackendError), match=reason):
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, out, left), dist.P2POp(dist.isend, spoilt, right)]):
            work.wait()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, out, left), dist.P2POp(dist.isend, mine, right)]):
        work.wait()
    same(out, codec.roundtrip(values(torch.float32, 5000, left)))
    # An exact scope holds for what is issued in it, though the block ends later.

    with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        with lc.exact():
            dist.irecv(out, left)
            dist.isend(values(torch.float32, 5000, r.rank), right)
    manager.wait()
    same(out, values(torch.float32, 5000, left))


def _works(r):
    """Complete without wait(), have a future, can be waited for by several threads, and keep a time-out apart."""
    codec = init(r)
    right, left = neighbours(r)
    n = 200_000
    want = codec.roundtrip(values(torch.float32, n, left))

    def exchange():
        got = torch.zeros(n)
        receive = dist.irecv(got, left)
        return got, receive, dist.isend(values(torch.float32, n, r.rank), right)

    got, receive, send = exchange()
    deadline = time.monotonic() + 30
    while not (receive.is_completed() and send.is_completed()):
        assert time.monotonic() < deadline, "does not complete without wait()"
        time.sleep(0.001)
    same(got, want)
    for work in (receive, send, receive):
        assert work.wait()
        assert work.is_success()
        assert exception_of(work) is None
    assert receive._source_rank() == left
    assert [t.data_ptr() for t in receive.result()] == [got.data_ptr()]

    got, receive, send = exchange()
    assert torch.equal(receive.get_future().then(lambda f: f.value()[0] + 1).wait(), want + 1)
    send.get_future().wait()
    got, receive, send = exchange()
    threads = [threading.Thread(target=receive.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    send.wait()
    for thread in threads:
        thread.join()
    same(got, want)
    # A wait of its own time-out fails alone.
    dist.barrier()
    if r.rank == 0:
        receive = dist.irecv(got.zero_(), left)
        with pytest.raises(dist.DistBackendError, match="waiting for recv .*within 50 ms; it goes on"):
            receive.wait(datetime.timedelta(milliseconds=50))
        assert not receive.is_completed()
        r.say("waited")
        receive.wait()
        same(got, want)
    elif r.rank == r.size - 1:
        r.hear("waited")
        dist.send(values(torch.float32, n, r.rank), 0)
    # A Work that is dropped has done its part all the same.
    dist.barrier()
    dist.isend(values(torch.float32, n, r.rank), right)
    dist.recv(got.zero_(), left)
    same(got, want)
    dist.barrier()


@pytest.mark.later
@pytest.mark.parametrize("part", [_values, _draws, _batches, _works])
def test_compressed_messages(pair, quad, part):
    pair(part)
    quad(part)


@pytest.mark.parametrize("part", [_values, _batches, _works])
def test_under_detailed_debugging(part):
    ranks.run_ranks(part, 2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
