"""The harness itself: it must see what goes wrong."""

import os
import signal
import sys
import time

import pytest
import ranks
import torch
import torch.distributed as dist

HANG_S = 5  # what passes for a hang; a busy machine must have started the ranks by then


def _sum(r):
    r.init("gloo")
    t = torch.ones(1) * (r.rank + 1)
    dist.all_reduce(t)
    return t.item()


def _misbehave(r, how):
    if r.rank == 1:
        if how == "raise":
            raise RuntimeError("a word to find")
        if how == "exit":
            os._exit(7)
        if how == "abort":
            os.abort()
        if how == "hang":
            time.sleep(1000)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
    return r.rank


def test_values_come_back(pair):
    assert ranks.run_ranks(_sum, 2) == [3.0, 3.0]
    assert pair(_sum) == [3.0, 3.0]
    assert pair(_sum) == [3.0, 3.0]


@pytest.mark.later
@pytest.mark.parametrize(
    ("how", "word"),
    [("raise", "a word to find"), ("exit", "exit code 7"), ("abort", "exit code -6"), ("hang", "sleep")],
)
def test_each_fault_is_seen(how, word):
    with pytest.raises(ranks.RanksFailed, match="rank 1|no end within") as failure:
        ranks.run_ranks(_misbehave, 2, how, timeout=HANG_S if how == "hang" else 60)
    assert word in str(failure.value) or (how == "hang" and "_misbehave" in str(failure.value))


def test_allowed_ends():
    assert ranks.run_ranks(_misbehave, 2, "exit", allow_exit={1: 7}) == [0, None]
    assert ranks.run_ranks(_misbehave, 2, "stop", kill_last=[1]) == [0, None]


@pytest.mark.later
@pytest.mark.parametrize("how", ["raise", "exit", "hang"])
def test_pool_restarts_after_a_fault(pair, how):
    with pytest.raises(ranks.RanksFailed):
        pair(_misbehave, how, timeout=HANG_S if how == "hang" else 60)
    assert pair(_sum) == [3.0, 3.0]


def test_nothing_is_left():
    before = {int(p) for p in os.listdir("/proc") if p.isdigit()}
    with pytest.raises(ranks.RanksFailed):
        ranks.run_ranks(_misbehave, 2, "hang", timeout=1)
    assert not [p for p in os.listdir("/proc") if p.isdigit() and int(p) not in before and _is_child(p)]


def _is_child(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return int(stat.read().rsplit(")", 1)[1].split()[1]) == ranks.zygote().process.pid
    except OSError:
        return False


_LAUNCHER = """
import os, pathlib, signal, subprocess, sys, time
if sys.argv[1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: (worker.kill(), worker.wait(), sys.exit(1)))
own_session = sys.argv[1] == "torchrun"
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=own_session)
pathlib.Path(sys.argv[2]).write_text(f"{os.getpid()} {worker.pid}")
print("a word to find", flush=True)
time.sleep(1000)
"""


@pytest.mark.later
@pytest.mark.parametrize("how", ["torchrun", "deaf"])
def test_a_command_that_hangs_leaves_nothing(tmp_path, how):
    """One that starts its workers in sessions of their own, as torchrun does, and one that does not listen."""
    with pytest.raises(ranks.RanksFailed, match="(?s)no end within.*a word to find"):
        ranks.run_command([sys.executable, "-c", _LAUNCHER, how, tmp_path / "pids"], deadline_s=HANG_S, patience_s=1)
    for pid in (tmp_path / "pids").read_text().split():
        assert _ends(pid), f"process {pid} is left"


def _ends(pid, looks=1000):
    """Whether a process is gone; one that was killed takes a moment."""
    for _ in range(looks):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.01)
    return False
