"""Cases of send and recv: a group with a p2p policy, neighbours on a ring, exchanges with them, equality of bits."""

import torch
import torch.distributed as dist
from collective_cases import bits, values
from compressed_by_hand import options

import torch_lowcomm as lc

SPEC = "sym4:bucket=1024"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def neighbours(r):
    return (r.rank + 1) % r.size, (r.rank - 1) % r.size


def init(r, spec=SPEC, **fields):
    r.init("lowcomm", pg_options=options(f"p2p={spec}", **fields))
    lc.reset_stats()
    return lc.codec(spec)


def stats():
    return lc.stats()[dist.group.WORLD.group_name]


def swap(r, mine, got):
    """Sends to the right neighbour and receives from the left one at the same time."""
    right, left = neighbours(r)
    for work in [dist.irecv(got, left), dist.isend(mine, right)]:
        work.wait()


def send_in_turn(r, n, want):
    """Each rank sends n elements to its right neighbour, blocking, one rank after another; `want(sent)` is to arrive."""
    right, _ = neighbours(r)
    for turn in range(r.size):
        t = values(torch.float32, n, turn)
        if r.rank == turn:
            dist.send(t, right)
        elif r.rank == (turn + 1) % r.size:
            got = torch.empty(n)
            assert dist.recv(got, turn) == turn
            same(got, want(t))


def same(got, want, about=""):
    assert torch.equal(bits(got), bits(want)), about
