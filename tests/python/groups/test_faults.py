"""Ranks that die or stall in the middle of an op: every live rank gets an error that says all of it, and none hangs.

Each fault is made with a real signal to a real process. Where a fault must be seen by itself the group's time-out is longer
than what the harness gives the ranks: waiting for it fails the test.
"""

import json
import os
import pathlib
import re
import signal
import time

import pytest
import ranks
import torch
import torch.distributed as dist

import torch_lowcomm as lc

BIG = 1 << 23  # elements a rank sends: many chunks, tens of milliseconds on loopback
DEADLINE_S = 60.0  # the harness's
NEVER_S = 10 * DEADLINE_S
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


def _says_everything(message, op, rank, culprit):
    """Op, sequence number, group, both ranks, bytes done, elapsed."""
    parts = [op, r"sequence \d+", r"group", rf"rank {rank}\b", rf"rank {culprit}\b", r"\d+ (bytes|B)\b|bytes"]
    parts.append(r"\d+(\.\d+)? ?(m?s|seconds)\b")
    missing = [part for part in parts if not re.search(part, message)]
    assert not missing, f"no {missing} in: {message}"


def _until_it_has_begun(op):
    """Until the op has sent something, or is under way where this rank sends nothing."""
    end = time.monotonic() + DEADLINE_S / 2
    while True:
        (record,) = lc.flight_record(dist.group.WORLD).values()
        last = record["ops"][-1]
        if last["state"] == "under way" if op == "broadcast" else last["sent_bytes"]:
            return
        assert time.monotonic() < end, "nothing left this rank"
        time.sleep(0.001)


def _expect_flight_record(message, op, rank, culprit):
    """The file that the error names has the op that failed, whom it waited for and what it lacks."""
    (path,) = map(pathlib.Path, re.findall(r"flight record: (\S+\.json)", message))
    record, name = json.loads(path.read_text()), dist.group.WORLD.group_name
    assert path.parent == pathlib.Path(os.environ["LOWCOMM_FLIGHT_DIR"])
    assert re.fullmatch(rf"lowcomm-flight-{name}-rank{rank}-pid{os.getpid()}-epoch\d+\.json", path.name)
    assert not list(path.parent.glob(f"*-pid{os.getpid()}-*.part")), "half a file"
    assert (record["group"], record["rank"], record["pid"]) == (name, rank, os.getpid())
    failed = next(entry for entry in record["ops"] if entry["state"] == "failed")
    assert failed["op"] == op
    assert failed["sequence"] == int(re.search(r"sequence (\d+)", message).group(1))
    assert record["because"] == failed["error"]
    assert record["because"] in message
    assert failed["description"]["elements a rank"] == str(BIG)
    assert failed["wait"]["rank"] != rank
    assert culprit in [entry["rank"] for entry in failed["missing"]], failed
    assert failed["sent_bytes"] > 0 or op == "broadcast"
    return path


def _fault(r, op, how, timeout_s, policy=""):
    """The last rank is killed or stopped in an op that the others are in the middle of; returns what they get."""
    r.init("lowcomm", pg_options=lc.Options(policy=policy, min_bytes=0))
    dist.barrier()
    _issue(r, op, 1000).wait()
    r.set_deadline(timeout_s)
    culprit = r.size - 1
    if r.rank == culprit:
        for other in range(culprit):  # It does not enter the op, so that the others cannot have finished it.
            r.hear(f"begun{other}")
        r.say("pid", os.getpid())
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        with pytest.raises(dist.DistBackendError):  # where it is resumed
            for _ in range(2):
                _issue(r, op).wait()
        r.say("resumed")
        return None
    with pytest.raises(dist.DistBackendError) as failure:
        work = _issue(r, op)
        _until_it_has_begun(op)
        r.say(f"begun{r.rank}")
        work.wait()
    op = op.split()[0]
    _says_everything(str(failure.value), op, r.rank, culprit)
    path = _expect_flight_record(str(failure.value), op, r.rank, culprit)
    # The group is over: what comes after fails too, with the same cause.
    with pytest.raises(dist.DistBackendError, match=re.escape(path.name)) as later:
        _issue(r, op).wait()
    assert f"rank {culprit}" in str(later.value), later.value
    (record,) = lc.flight_record(dist.group.WORLD).values()  # still to be asked for
    assert op in [entry["op"] for entry in record["ops"] if entry["state"] == "failed"]
    r.say(f"survived{r.rank}")
    if how == "stopped and resumed" and r.rank == 0:
        for q in range(1, culprit):
            r.hear(f"survived{q}")
        os.kill(int(r.hear("pid")), signal.SIGCONT)
        r.hear("resumed")
    dist.destroy_process_group()  # must come back
    return str(failure.value)


CODED = "all_gather=minmax8; reduce_scatter=qsgd8; all_reduce=sym4"
OWN = ("all_gather", "all_gather list", "reduce_scatter", "all_reduce")


@pytest.mark.parametrize("policy", ["", CODED])
@pytest.mark.parametrize("op", OWN)
def test_a_killed_rank_is_named(op, policy):
    """A death is seen by itself, long before any time-out."""
    allowed = {2: -signal.SIGKILL}
    ranks.run_ranks(_fault, 3, op, "killed", NEVER_S, policy, allow_exit=allowed, timeout=DEADLINE_S)


def test_a_killed_root_is_reported_by_the_time_out_at_the_latest():
    """A rank that hears nothing from another one that waits for the root has only the time-out."""
    ranks.run_ranks(_fault, 3, "broadcast", "killed", 4.0, allow_exit={2: -signal.SIGKILL}, timeout=DEADLINE_S)


@pytest.mark.later
@pytest.mark.parametrize(
    ("op", "policy"), [("all_gather", ""), ("all_gather", CODED), ("all_reduce", ""), ("reduce_scatter", CODED)]
)
def test_a_stopped_rank_is_named_after_the_deadline(op, policy):
    said = ranks.run_ranks(_fault, 3, op, "stopped", 2.0, policy, kill_last=[2], timeout=DEADLINE_S)[:2]
    # One of them waited the deadline out; it may have told the other before that one did.
    assert any(TIMED_OUT.search(message) for message in said), said


@pytest.mark.later
def test_a_rank_that_comes_back_is_fenced_off():
    """Stopped past the deadline and resumed: it learns that the group went on without it, and hangs no more than they."""
    ranks.run_ranks(_fault, 3, "all_gather", "stopped and resumed", 2.0, timeout=DEADLINE_S)


@pytest.mark.on(3, allow_exit={2: -signal.SIGKILL})
def test_another_group_lives_on(r):
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
