"""send, recv, recv from any source, and batches of them: every dtype, tags, order, big messages both ways at once."""

import collective_cases as cases
import torch
import torch.distributed as dist
from collective_cases import bits, values
from p2p_cases import neighbours, send_in_turn, swap


def _p2p(r):
    r.init("lowcomm")
    right, left = neighbours(r)
    for dtype in cases.FLOATS + cases.INTEGERS + cases.OTHERS:
        for n in (0, 1, 1000):
            mine, theirs = values(dtype, n, r.rank), values(dtype, n, left)
            got = torch.zeros_like(mine)
            swap(r, mine, got)
            assert torch.equal(bits(got), bits(theirs)), (dtype, n)
    send_in_turn(r, 333, lambda sent: sent)
    # Tags pick the message, whatever the order of arrival; equal tags keep their order.
    sends = [dist.isend(values(torch.float32, 10, r.rank, tag), right, tag=tag) for tag in (7, 3, 5)]
    twice = [dist.isend(values(torch.float32, 10, r.rank, "twice", k), right, tag=9) for k in range(2)]
    for tag in (5, 7, 3):
        got = torch.empty(10)
        dist.recv(got, left, tag=tag)
        assert torch.equal(got, values(torch.float32, 10, left, tag)), tag
    for k in range(2):
        got = torch.empty(10)
        dist.recv(got, left, tag=9)
        assert torch.equal(got, values(torch.float32, 10, left, "twice", k)), k
    for work in sends + twice:
        work.wait()
    # From anybody.
    if r.rank == 0:
        seen = {}
        for _ in range(r.size - 1):
            got = torch.empty(64)
            seen[dist.recv(got, None, tag=1)] = got
        assert sorted(seen) == list(range(1, r.size)), sorted(seen)
        for source, got in seen.items():
            assert torch.equal(got, values(torch.float32, 64, source)), source
    else:
        dist.send(values(torch.float32, 64, r.rank), 0, tag=1)
    # Big messages both ways at once, the send first: neither may block the other.
    big = values(torch.float32, 1 << 20, r.rank)
    got = torch.empty_like(big)
    work = dist.isend(big, right)
    dist.irecv(got, left).wait()
    work.wait()
    assert torch.equal(got, values(torch.float32, 1 << 20, left))


def _batches(r):
    r.init("lowcomm")
    right, left = (r.rank + 1) % r.size, (r.rank - 1) % r.size
    for n, dtype in ((0, torch.float32), (5, torch.bfloat16), (300_007, torch.float32)):
        for receives_first in (True, False):
            for count in (1, 3):
                outs = [torch.zeros(n, dtype=dtype) for _ in range(count)]
                recvs = [dist.P2POp(dist.irecv, t, left, tag=k) for k, t in enumerate(outs)]
                sends = [dist.P2POp(dist.isend, values(dtype, n, r.rank, k), right, tag=k) for k in range(count)]
                ops = recvs + sends if receives_first else sends + recvs
                for work in dist.batch_isend_irecv(ops):
                    work.wait()
                for k, t in enumerate(outs):
                    assert torch.equal(bits(t), bits(values(dtype, n, left, k))), (n, receives_first, count, k)
    # Without tags, as pipelining does: order alone pairs them.
    outs = [torch.zeros(9) for _ in range(4)]
    ops = [dist.P2POp(dist.irecv, t, left) for t in outs]
    ops += [dist.P2POp(dist.isend, values(torch.float32, 9, r.rank, k), right) for k in range(4)]
    works = dist.batch_isend_irecv(ops)
    for work in works:
        work.wait()
    assert all(torch.equal(t, values(torch.float32, 9, left, k)) for k, t in enumerate(outs))
    # A batch of one direction only, on some ranks only.
    if r.rank == 0:
        dist.batch_isend_irecv([dist.P2POp(dist.isend, values(torch.float32, 3, 0), 1)])[0].wait()
    elif r.rank == 1:
        got = torch.empty(3)
        dist.batch_isend_irecv([dist.P2POp(dist.irecv, got, 0)])[0].wait()
        assert torch.equal(got, values(torch.float32, 3, 0))


def test_send_recv_tags_and_any_source(pair, quad):
    pair(_p2p)
    quad(_p2p)


def test_batch_isend_irecv(pair, quad):
    pair(_batches)
    quad(_batches)
