"""Ranks that die or stall in the middle of an op: every live rank gets an error that says all of it, and none hangs.

Each fault is made with a real signal to a real process. Where a fault must be seen by itself the group's time-out is longer
than what the harness gives the ranks: waiting for it fails the test.
"""

import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ranks
import torch
import torch.distributed as dist

BIG = 1 << 23  # elements a rank sends: many chunks, tens of milliseconds on loopback
DEADLINE_S = 60.0  # the harness's
NEVER_S = 10 * DEADLINE_S
POLICY = "all_gather=minmax8; reduce_scatter=qsgd8"
TIMED_OUT = re.compile(r"(?i)timed out waiting 2000 ?ms")


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


def _fault(r, op, how, timeout_s, policy=""):
    """The last rank is killed or stopped in the middle of an op; returns what the others get."""
    import torch_lowcomm as lc

    r.init("lowcomm", pg_options=lc.Options(policy=policy, min_bytes=0))
    own = op.startswith(("all_gather", "reduce_scatter"))
    dist.barrier()
    _issue(r, op, 1000).wait()
    r.set_deadline(timeout_s)
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
    with pytest.raises(dist.DistBackendError) as failure:
        for _ in range(50):  # the first may have been through before the signal
            _issue(r, op).wait()
    _says_everything(str(failure.value), op.split()[0], r.rank, culprit, own)
    # The group is over: what comes after fails too, with the same cause.
    if own:
        with pytest.raises(dist.DistBackendError) as later:
            _issue(r, op).wait()
        assert f"rank {culprit}" in str(later.value), later.value
    r.say(f"survived{r.rank}")
    if how == "stopped and resumed" and r.rank == 0:
        for q in range(1, culprit):
            r.hear(f"survived{q}")
        os.kill(int(r.hear("pid")), signal.SIGCONT)
        r.hear("resumed")
    dist.destroy_process_group()  # must come back
    return str(failure.value)


def _fault_with_pid(r, op, how, timeout_s):
    if r.rank == r.size - 1:
        r.say("pid", os.getpid())
    return _fault(r, op, how, timeout_s)


OWN = ("all_gather", "all_gather list", "reduce_scatter")


@pytest.mark.parametrize("op", [*OWN, "all_reduce"])
def test_a_killed_rank_is_named(op):
    """A death is seen by itself, long before any time-out."""
    ranks.run_ranks(_fault, 3, op, "killed", NEVER_S, allow_exit={2: -signal.SIGKILL}, timeout=DEADLINE_S)


def test_a_killed_root_is_reported_by_the_time_out_at_the_latest():
    """Gloo's broadcast goes over other ranks: one that hears nothing from them has only the time-out."""
    ranks.run_ranks(_fault, 3, "broadcast", "killed", 4.0, allow_exit={2: -signal.SIGKILL}, timeout=DEADLINE_S)


@pytest.mark.later
@pytest.mark.parametrize("op", [*OWN, "all_reduce"])
def test_a_stopped_rank_is_named_after_the_deadline(op):
    said = ranks.run_ranks(_fault, 3, op, "stopped", 2.0, kill_last=[2], timeout=DEADLINE_S)[:2]
    # One of them waited the deadline out; it may have told the other before that one did.
    assert any(TIMED_OUT.search(message) for message in said), said


@pytest.mark.later
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_a_rank_that_comes_back_is_fenced_off(op):
    """Stopped past the deadline and resumed: it learns that the group went on without it, and hangs no more than they."""
    ranks.run_ranks(_fault_with_pid, 3, op, "stopped and resumed", 2.0, timeout=DEADLINE_S)


PROGRESS_DEADLINE_S = 3.0
STOP_S = 0.6
STOPS = 6  # longer than the deadline, all together


def _stutter(pid, landed, over):
    """Stops a process again and again, each time until some of its data `landed`; returns how often."""
    for stops in range(STOPS):
        before = landed()
        if over.is_set():
            return stops
        os.kill(pid, signal.SIGSTOP)
        time.sleep(STOP_S)
        os.kill(pid, signal.SIGCONT)
        while not over.is_set() and landed() == before:
            time.sleep(0.001)
    return STOPS


def _slow(r, op):
    """The peer is stopped most of the time: the op takes longer than the deadline, but bytes keep coming."""
    import torch_lowcomm as lc

    r.init("lowcomm", pg_options=lc.Options(chunk_bytes=65536))
    r.say(f"pid{r.rank}", os.getpid())
    other = int(r.hear(f"pid{1 - r.rank}"))
    gathers = op == "all_gather"
    out = torch.zeros(2 * BIG if gathers else BIG)
    mine = torch.full((BIG if gathers else 2 * BIG,), float(r.rank + 1))
    marks = out[-BIG:][:: 65536 // 4]  # where rank 1's data comes to rank 0, one element of each frame
    dist.all_gather_into_tensor(torch.empty(2), torch.ones(1))  # connects, the first time
    dist.barrier()
    r.set_deadline(PROGRESS_DEADLINE_S)
    over = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        if r.rank == 0:
            stuttering = executor.submit(_stutter, other, lambda: int(marks.count_nonzero()), over)
        try:
            dist.all_gather_into_tensor(out, mine) if gathers else dist.reduce_scatter_tensor(out, mine)
        finally:
            over.set()
    if gathers:
        assert (out[:BIG] == 1).all()
        assert (out[BIG:] == 2).all()
    else:
        assert (out == 3).all()
    return stuttering.result() if r.rank == 0 else 0


@pytest.mark.later
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_the_deadline_is_on_progress_not_on_the_whole(op):
    assert STOP_S * STOPS > PROGRESS_DEADLINE_S
    stops, _ = ranks.run_ranks(_slow, 2, op, timeout=DEADLINE_S)
    assert stops == STOPS, "the op was too fast to outlast the deadline"


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
    with pytest.raises(dist.DistBackendError, match=r"rank 1 did not say hello within 3000 ms"):
        r.init("lowcomm", timeout_s=3)


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


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_a_rank_killed_in_a_compressed_op(op):
    allowed = {2: -signal.SIGKILL}
    ranks.run_ranks(_fault, 3, op, "killed", NEVER_S, POLICY, allow_exit=allowed, timeout=DEADLINE_S)


@pytest.mark.later
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_a_rank_stopped_in_a_compressed_op(op):
    said = ranks.run_ranks(_fault, 3, op, "stopped", 2.0, POLICY, kill_last=[2], timeout=DEADLINE_S)[:2]
    assert any(TIMED_OUT.search(message) for message in said), said
