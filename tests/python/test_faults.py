"""Ranks that die or stall in the middle of an op: every live rank gets an error that says all of it, and none hangs.

Each fault is made with a real signal to a real process.
"""

import os
import re
import signal
import threading
import time

import pytest
import ranks
import torch
import torch.distributed as dist

BIG = 1 << 23  # elements a rank sends: many chunks, tens of milliseconds on loopback


def _issue(r, op, n=BIG):
    if op == "all_gather":
        return dist.all_gather_into_tensor(torch.empty(n * r.size), torch.ones(n), async_op=True)
    if op == "all_gather list":
        return dist.all_gather([torch.empty(n) for _ in range(r.size)], torch.ones(n), async_op=True)
    if op == "reduce_scatter":
        return dist.reduce_scatter_tensor(torch.empty(n), torch.ones(n * r.size), async_op=True)
    if op == "all_reduce":
        return dist.all_reduce(torch.ones(n), async_op=True)
    return dist.broadcast(torch.ones(n), r.size - 1, async_op=True)


def _says_everything(message, op, rank, culprit, own):
    """Op, sequence number, group, both ranks, bytes done, elapsed (an op that gloo runs knows no peer and no bytes)."""
    parts = [op, r"sequence \d+", r"group", rf"rank {rank}\b"]
    if own:
        parts += [rf"rank {culprit}\b", r"\d+ (bytes|B)\b|bytes", r"\d+(\.\d+)? ?(m?s|seconds)\b"]
    missing = [part for part in parts if not re.search(part, message)]
    assert not missing, f"no {missing} in: {message}"


def _fault(r, op, how, timeout_s):
    """The last rank is killed or stopped in the middle of an op; what the others get, and how soon."""
    r.init("lowcomm", timeout_s=timeout_s)
    own = op.startswith(("all_gather", "reduce_scatter"))
    dist.barrier()
    _issue(r, op, 1000).wait()
    culprit = r.size - 1
    if r.rank == culprit:
        work = _issue(r, op)
        time.sleep(0.004)  # into it
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        if how == "stopped and resumed":
            with pytest.raises(dist.DistBackendError):
                work.wait()
                _issue(r, op).wait()
            r.say("resumed")
        return None
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as failure:
        for _ in range(50):  # the first may have been through before the signal
            _issue(r, op).wait()
    elapsed = time.monotonic() - start
    _says_everything(str(failure.value), op.split()[0], r.rank, culprit, own)
    # The group is over: what comes after fails at once, with the same cause.
    start = time.monotonic()
    if own:
        with pytest.raises(dist.DistBackendError) as later:
            _issue(r, op).wait()
        assert time.monotonic() - start < 5
        assert f"rank {culprit}" in str(later.value), later.value
    r.say(f"survived{r.rank}")
    if how == "stopped and resumed" and r.rank == 0:
        for q in range(1, culprit):
            r.hear(f"survived{q}")
        os.kill(int(r.hear("pid")), signal.SIGCONT)
        r.hear("resumed")
    dist.destroy_process_group()  # must come back
    return elapsed


def _fault_with_pid(r, op, how, timeout_s):
    if r.rank == r.size - 1:
        r.say("pid", os.getpid())
    return _fault(r, op, how, timeout_s)


OWN = ("all_gather", "all_gather list", "reduce_scatter")


@pytest.mark.parametrize("op", [*OWN, "all_reduce"])
def test_a_killed_rank_is_named(op):
    elapsed = ranks.run_ranks(_fault, 3, op, "killed", 30.0, allow_exit={2: -signal.SIGKILL}, timeout=60)
    assert max(elapsed[:2]) < 20, f"a death is seen at once, not by the time-out: {elapsed}"


def test_a_killed_root_is_reported_by_the_time_out_at_the_latest():
    """Gloo's broadcast goes over other ranks: one that hears nothing from them has only the time-out."""
    elapsed = ranks.run_ranks(_fault, 3, "broadcast", "killed", 4.0, allow_exit={2: -signal.SIGKILL}, timeout=60)
    assert max(elapsed[:2]) < 30, elapsed


@pytest.mark.parametrize("op", [*OWN, "all_reduce"])
def test_a_stopped_rank_is_named_after_the_deadline(op):
    elapsed = ranks.run_ranks(_fault, 3, op, "stopped", 2.0, kill_last=[2], timeout=60)
    assert max(elapsed[:2]) < 20, elapsed
    assert max(elapsed[:2]) > 1.5, f"given up before the deadline: {elapsed}"


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_a_rank_that_comes_back_is_fenced_off(op):
    """Stopped past the deadline and resumed: it learns that the group went on without it, and hangs no more than they."""
    ranks.run_ranks(_fault_with_pid, 3, op, "stopped and resumed", 2.0, timeout=60)


def _slow(r, op):
    """The peer is stopped most of the time: the op takes longer than the time-out, but bytes keep coming."""
    r.init("lowcomm", timeout_s=1.0)
    r.say(f"pid{r.rank}", os.getpid())
    other = int(r.hear(f"pid{1 - r.rank}"))
    over = threading.Event()

    def stutter():
        while not over.is_set():
            os.kill(other, signal.SIGSTOP)
            time.sleep(0.25)
            os.kill(other, signal.SIGCONT)
            over.wait(0.02)

    n, elapsed = BIG, 0.0
    while elapsed < 1.5 and n < BIG * 32:
        n *= 2
        small, big = torch.full((n,), float(r.rank + 1)), torch.full((2 * n,), float(r.rank + 1))
        dist.all_gather_into_tensor(torch.empty(2), torch.ones(1))  # connects, the first time
        dist.barrier()
        over.clear()
        stutterer = threading.Thread(target=stutter)
        start = time.monotonic()
        if r.rank == 0:
            stutterer.start()
        try:
            if op == "all_gather":
                dist.all_gather_into_tensor(big, small)
            else:
                dist.reduce_scatter_tensor(small, big)
        finally:
            over.set()
            if r.rank == 0:
                stutterer.join()
        elapsed = time.monotonic() - start
        if op == "all_gather":
            assert (big[:n] == 1).all()
            assert (big[n:] == 2).all()
        else:
            assert (small == 3).all()
        r.say(f"took{n}.{r.rank}", elapsed)
        longest = [float(r.hear(f"took{n}.{q}")) for q in range(2)]
        elapsed = min(longest)
    return elapsed


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_the_deadline_is_on_progress_not_on_the_whole(op):
    assert min(ranks.run_ranks(_slow, 2, op, timeout=90)) > 1.5, "the op was too fast to outlast the deadline"


def _p2p(r):
    r.init("lowcomm", timeout_s=20)
    dist.barrier()
    if r.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError, match="recv"):
        dist.recv(torch.empty(3), 1)
    with pytest.raises(dist.DistBackendError, match="barrier"):
        dist.barrier()


def test_receiving_from_a_dead_rank_fails():
    ranks.run_ranks(_p2p, 2, allow_exit={1: -signal.SIGKILL})


def _dies_at_creation(r):
    if r.rank == 1:
        r.hear("started")
        os.kill(os.getpid(), signal.SIGKILL)
    r.say("started")
    start = time.monotonic()
    with pytest.raises(Exception, match=r"rank|[Tt]ime|timed out") as failure:
        r.init("lowcomm", timeout_s=3)
    assert time.monotonic() - start < 30, failure.value


def test_a_rank_that_never_joins_is_reported():
    ranks.run_ranks(_dies_at_creation, 2, allow_exit={1: -signal.SIGKILL}, timeout=60)


def _two_groups(r):
    """A fault in one group leaves the other one alone (the ranks of the second are all alive)."""
    r.init("lowcomm", timeout_s=30)
    inner = dist.new_group([0, 1])
    dist.barrier()
    if r.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError):
        for _ in range(5):
            _issue(r, "all_gather", 1000).wait()
    for _ in range(3):
        out = torch.empty(4)
        dist.all_gather_into_tensor(out, torch.full((2,), float(r.rank)), group=inner)
        assert out.tolist() == [0, 0, 1, 1]
        mine = torch.empty(1)
        dist.reduce_scatter_tensor(mine, torch.ones(2), group=inner)
        assert mine.item() == 2


def test_another_group_lives_on():
    ranks.run_ranks(_two_groups, 3, allow_exit={2: -signal.SIGKILL})


def _compressed(r, op):
    import torch_lowcomm as lc

    policy = "all_gather=minmax8; reduce_scatter=qsgd8"
    r.init("lowcomm", timeout_s=20, pg_options=lc.Options(policy=policy, min_bytes=0))
    _issue(r, op, 5000).wait()
    if r.rank == 1:
        work = _issue(r, op)
        time.sleep(0.004)
        os.kill(os.getpid(), signal.SIGKILL)
        work.wait()
    with pytest.raises(dist.DistBackendError) as failure:
        for _ in range(20):
            _issue(r, op).wait()
    _says_everything(str(failure.value), op, 0, 1, own=True)


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_a_rank_killed_in_a_compressed_op(op):
    ranks.run_ranks(_compressed, 2, op, allow_exit={1: -signal.SIGKILL})
