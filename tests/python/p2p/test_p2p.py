"""send and recv: every dtype, tags, order, big messages both ways at once."""

import collective_cases as cases
import pytest
import torch
import torch.distributed as dist
from collective_cases import bits, values
from p2p_cases import neighbours, send_in_turn, swap


@pytest.mark.on("pair", "quad")
def test_send_recv_and_tags(r):
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
    # Big messages both ways at once, the send first: neither may block the other.
    big = values(torch.float32, 1 << 20, r.rank)
    got = torch.empty_like(big)
    work = dist.isend(big, right)
    dist.irecv(got, left).wait()
    work.wait()
    assert torch.equal(got, values(torch.float32, 1 << 20, left))
