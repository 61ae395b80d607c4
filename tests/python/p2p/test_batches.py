"""A mistake inside a coalescing block: raised at the block's end with nothing started, and the group works on."""

import pytest
import torch
import torch.distributed as dist
from collective_cases import values
from group_check import check_group
from p2p_cases import init, neighbours, same
from torch.distributed.distributed_c10d import _coalescing_manager, _world

import torch_lowcomm as lc

N = 5000


def _exchange(r, codec, salt):
    """A batch whose values tell it from every other."""
    right, left = neighbours(r)
    got = torch.zeros(N)
    ops = [dist.P2POp(dist.isend, values(torch.float32, N, r.rank, salt), right), dist.P2POp(dist.irecv, got, left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    sent = values(torch.float32, N, left, salt)
    same(got, codec.roundtrip(sent) if codec else sent, salt)


def test_a_mistake_in_a_block(r):
    codec = init(r)
    right, left = neighbours(r)
    x = torch.ones(N)
    coded = {
        "expected a tag of 0": lambda: dist.P2POp(dist.isend, x, right, tag=2**30),
        "expected an output without elements that share memory": lambda: dist.P2POp(
            dist.irecv, torch.empty(1).expand(N), left
        ),
    }
    exact = {
        "expected a contiguous tensor": lambda: dist.P2POp(dist.isend, torch.ones(70, 80).t(), right),
        "expected a tag of 0 or more": lambda: dist.P2POp(dist.irecv, torch.empty(5), left, tag=-1),
    }
    salt = 0
    for wrong, exactly in ((coded, False), (exact, True)):
        if exactly:
            lc.set_policy(None, "")
        for reason, bad in wrong.items():
            for at in range(3):
                good = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, torch.zeros(N), left)]
                with pytest.raises(ValueError, match=reason):
                    dist.batch_isend_irecv([*good[:at], bad(), *good[at:]])
                assert not _world.pg_coalesce_state, "torch's list of the block is gone"
                # Were anything of the batch under way, these would get its values.
                salt += 1
                _exchange(r, None if exactly else codec, salt)
                with lc.exact():
                    _exchange(r, None, salt)
                check_group(r)


def test_works_of_a_block_that_failed_have_its_error_and_start_nothing(r):
    codec = init(r)
    right, left = neighbours(r)
    works = []
    with (
        pytest.raises(ValueError, match="expected a tag of 0"),
        _coalescing_manager(device=torch.device("cpu"), async_ops=True),
    ):
        works.append(dist.isend(torch.ones(N), right))
        works.append(dist.isend(torch.ones(N), right, tag=2**30))
        works.append(dist.irecv(torch.zeros(N), left))
    for work in works:
        with pytest.raises(ValueError, match="expected a tag of 0"):
            work.wait()
    _exchange(r, codec, 1)
