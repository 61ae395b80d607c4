"""Machines that come and go, each a launcher of its own: killed, stopped and woken, late, twice the same."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from elastic_machine import TrainingResult, join

import torch_lowcomm as lc

DEADLINE_S = 90


@pytest.mark.later
@pytest.mark.parametrize("mode", ["sync", "continue"])
@pytest.mark.on(3, alike=True, timeout=DEADLINE_S, allow_exit={2: -signal.SIGKILL})
def test_goes_on_without_a_killed_machine(r, port, mode):
    """One of three is killed between outer steps; the others go on by themselves."""
    members = join(port, f"machine{r.rank}")
    trained = TrainingResult(members, r.rank, mode=mode)
    while len(members.formed.machines) < 3:  # the first two did not wait for the third
        trained.steps(1, pause_s=0.02)
    trained.steps(6)
    if r.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    trained.steps(10)
    assert trained.lost, "nobody noticed"
    assert "outer_step" in trained.lost[0], trained.lost[0]
    assert trained.opt.report["participating"] == 2
    assert sorted(members.formed.machines) == ["machine0", "machine1"]
    outer = trained.outer()
    members.leave()
    return outer, trained.opt.report["outer_steps"]


@pytest.mark.later
@pytest.mark.on(3, alike=True, timeout=DEADLINE_S)
def test_fences_off_a_machine_that_wakes_up(r, port):
    """One of three is stopped for longer than the deadline, and finds the others gone on without it when it wakes up."""
    members = join(port, f"machine{r.rank}", timeout=timedelta(seconds=6))
    trained = TrainingResult(members, r.rank, mode="continue")
    while len(members.formed.machines) < 3:
        trained.steps(1, pause_s=0.02)
    trained.steps(5)
    if r.rank == 2:
        r.say("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    elif r.rank == 0:
        while len(members.formed.machines) > 2:
            trained.steps(1)
        os.kill(int(r.hear("pid")), signal.SIGCONT)
    while len(members.formed.machines) > 2 and not trained.lost:
        trained.steps(1)
    deadline = time.monotonic() + DEADLINE_S / 2
    while len(members.formed.machines) < 3:
        assert time.monotonic() < deadline, members.formed
        trained.steps(1, pause_s=0.02)
    assert len(trained.lost) == 1, trained.lost
    return trained.ends_with(members)


@pytest.mark.on(2, timeout=DEADLINE_S)
def test_refuses_a_machine_id_twice(r, port):
    if r.rank == 1:
        r.hear("first")
        with pytest.raises(ValueError, match="machine_id: expected one that no living machine has, got 'same'"):
            join(port, "same", lost_after_s=10.0)
        r.say("refused")
        return
    members = join(port, "same", lost_after_s=10.0)
    r.say("first")
    r.hear("refused")
    assert members.alive() == {"same"}
    members.leave()


@pytest.mark.on(2, timeout=DEADLINE_S)
def test_refuses_a_machine_that_runs_something_else(r, port):
    members = join(port, f"machine{r.rank}", min_machines=1, patience_s=1.0)
    if r.rank == 0:
        TrainingResult(members, 0)
        r.say("first")
        r.hear("refused")
    else:
        r.hear("first")
        with pytest.raises(ValueError, match=r"DiLoCoX: expected what the other .*'sync_every=4 .*got 'sync_every=5 "):
            TrainingResult(members, 1, sync_every=5)
        r.say("refused")
    members.leave()


@pytest.mark.later
@pytest.mark.on(2, alike=True, timeout=DEADLINE_S)
def test_resumes_with_other_machines(r, port):
    """Two machines train and save; one of them is all that comes back, at first."""
    members = join(port, f"machine{r.rank}")
    trained = TrainingResult(members, r.rank, mode="sync")
    trained.steps(9)
    saved, model = trained.opt.state_dict(), trained.model.state_dict()
    with pytest.raises(ValueError, match="load_state_dict: expected a process group, got a Membership.*resume="):
        trained.opt.load_state_dict(saved)
    outer, steps = trained.outer(), trained.opt.steps
    members.leave()
    r.say(f"left{r.rank}")
    if r.rank == 1:
        r.hear("resumed")
    else:
        r.hear("left1")
    # Machine 0 goes on alone at once; machine 1 waits for it, so that it does not begin a group of its own.
    again = join(port, f"machine{r.rank}", min_machines=1, patience_s=1.0 if r.rank == 0 else 15.0)
    back = TrainingResult(again, r.rank, mode="sync", resume=saved if r.rank == 0 else None)
    if r.rank == 0:
        assert back.opt.steps == steps
        assert all(torch.equal(a, b) for (_, a), b in zip(back.opt._outer.carried(), outer, strict=True))
        assert again.formed.machines == ("machine0",)
        back.model.load_state_dict(model)
        r.say("resumed")
    else:
        assert back.opt.steps >= steps
    while len(again.formed.machines) < 2:
        back.steps(1, pause_s=0.02)
    back.steps(20)
    ended = back.outer()
    again.leave()
    return ended


@pytest.mark.on(3, timeout=DEADLINE_S, allow_exit={2: -signal.SIGKILL})
def test_names_the_loss_of_the_store(r):
    """Rank 2 is the store, and is killed; the others keep what they have."""
    if r.rank == 2:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        r.say("port", str(store.port))
        for q in range(2):
            r.hear(f"trained{q}")
        os.kill(os.getpid(), signal.SIGKILL)
    members = join(int(r.hear("port")), f"machine{r.rank}")
    trained = TrainingResult(members, r.rank, mode="sync")
    trained.steps(5)
    before = trained.opt.state_dict()["param_groups"][0]["outer"]
    r.say(f"trained{r.rank}")
    with pytest.raises(ConnectionError, match="membership: lost the store"):
        trained.steps(4000, pause_s=0.01)
    after = trained.opt.state_dict()["param_groups"][0]["outer"]  # whole: it can be saved
    assert before.keys() == after.keys()
    assert after["steps"] > before["steps"]


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"machine_id": ""}, ValueError, "machine_id: expected a text, got ''"),
        ({"min_machines": 0}, ValueError, "min_machines: expected 1 or more, got 0"),
        ({"patience_s": 300}, ValueError, "patience_s: expected less than the timeout, 300 s, got 300"),
        ({"lost_after_s": 600}, ValueError, "0.6 lost_after_s: expected less than the timeout, 300 s, got 360"),
        ({"lost_after_s": 0}, ValueError, "lost_after_s: expected a number above 0, got 0"),
        ({"store": None}, TypeError, "store: expected a torch.distributed.Store, got NoneType"),
    ],
)
def test_refuses(store, arguments, error, says):
    given = {"store": store, "machine_id": "a"} | arguments
    with pytest.raises(error, match=says):
        lc.Membership(given.pop("store"), given.pop("machine_id"), **given)


@pytest.mark.on(2, timeout=DEADLINE_S, allow_exit={1: -signal.SIGKILL})
def test_the_last_machine_has_the_outer_parameters(r, port):
    """The last machine but one is killed before the end: too few are left, and the outer parameters are the result."""
    members = join(port, f"machine{r.rank}", timeout=timedelta(seconds=3), patience_s=1.0)
    trained = TrainingResult(members, r.rank, mode="continue")
    trained.steps(9)
    if r.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError):
        trained.opt.finish()
    with pytest.raises(TimeoutError, match=r"expected 2 machines or more .*, got \['machine0'\]"):
        trained.opt.regroup()
    with trained.opt.outer_parameters():
        outer = [p.detach().clone() for p in trained.model.parameters()]
    trained.opt.restore()
    assert trained.opt.report["outer_steps"] == 2
    assert all(torch.equal(p, o) for p, o in zip(trained.model.parameters(), outer, strict=True))
    members.leave()
