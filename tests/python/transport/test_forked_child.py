"""A child that a rank forks (a DataLoader's worker, say): it keeps no connection of the rank's open, and hangs at nothing."""

import os
import signal
import sys
import time
import traceback

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import torch_lowcomm as lc

DEADLINE_S = 90.0  # the harness's, which finds what hangs
NEVER_S = 60 * DEADLINE_S


def _init(r, **options):
    r.init(timeout_s=NEVER_S, pg_options=lc.Options(**options))
    x = torch.ones(1000)
    dist.all_reduce(x)


@pytest.mark.on(2, timeout=DEADLINE_S, allow_exit={1: -signal.SIGKILL})
def test_a_peer_learns_of_a_killed_rank_whose_child_lives(r):
    _init(r)
    if r.rank == 1:
        if os.fork() == 0:
            time.sleep(2 * DEADLINE_S)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError, match="the peer's process or group is gone"):
        dist.all_reduce(torch.ones(1000))


def _in_child(parent, peer, folder):
    """What a program may do in a child that has not made a group of its own yet, and then with one."""
    x = torch.ones(10)
    for op in (
        dist.all_reduce,
        lambda t: dist.all_gather([x, x], t),
        lambda t: dist.send(t, peer),
        lambda t: dist.barrier(),
    ):
        with pytest.raises(dist.DistBackendError) as caught:
            op(x)
        assert f"expected the process that made the group, {parent}, got {os.getpid()}" in str(caught.value)
    dist.destroy_process_group()
    dist.init_process_group("lowcomm", init_method=f"file://{folder}/child{parent}", rank=0, world_size=1)
    dist.all_reduce(x)
    dist.destroy_process_group()


@pytest.mark.parametrize("policy", ["", "all_reduce=minmax8; all_gather=minmax8; p2p=sym4"])
@pytest.mark.on(2, timeout=DEADLINE_S)
def test_ops_of_a_child_are_refused_and_the_group_goes_on(r, policy):
    _init(r, policy=policy, min_bytes=0)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            _in_child(parent, 1 - r.rank, r.folder)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    x = torch.ones(1000)
    dist.all_reduce(x)
    assert os.waitstatus_to_exitcode(status) == 0
    assert round(x[0].item(), 2) == 2


@pytest.mark.on(2, timeout=DEADLINE_S)
def test_a_child_ends_as_a_program_does(r):
    _init(r)
    child = os.fork()
    if child == 0:
        sys.exit(0)  # the interpreter is finalised, and the group with it
    _, status = os.waitpid(child, 0)
    dist.barrier()
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.on(2, timeout=DEADLINE_S)
def test_a_loader_with_workers_feeds_a_group(r):
    _init(r)
    total = torch.zeros(1)
    for batch in DataLoader(list(range(32)), batch_size=4, num_workers=2, multiprocessing_context="fork"):
        total += batch.sum()
        dist.all_reduce(total)
        total /= r.size
    assert total.item() == sum(range(32))
