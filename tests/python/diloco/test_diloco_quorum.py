"""lc.DiLoCoX with a quorum: a machine that is stopped, slow or killed does not hold the others up, and loses no work."""

import os
import signal
import time
from datetime import timedelta

import pytest
from elastic_machine import TrainingResult, join

DEADLINE_S = 90
TIMEOUT = timedelta(seconds=60)  # a wait for the late machine would take as long, and fail the test by its deadline
MODES = {
    "sync": {"mode": "sync"},
    "continue": {"mode": "continue"},
    "fragments": {"mode": "restart", "fragments": 2, "fragment_sync_delay": 1},
}


def _machine(r, port, **options):
    members = join(port, f"machine{r.rank}", timeout=TIMEOUT, lost_after_s=5.0)
    return members, TrainingResult(members, r.rank, quorum=2, grace_s=0.5, **options)


def _until(trained, condition, deadline_s=DEADLINE_S / 2):
    """Trains until a condition holds, which all that train meet after the same outer step."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, trained.opt.report
        trained.steps(1, pause_s=0.01)


@pytest.mark.parametrize(("mode", "how"), [("sync", "stopped"), ("continue", "slow"), ("fragments", "stopped")])
@pytest.mark.on(3, alike=True, timeout=DEADLINE_S)
def test_goes_on_without_a_late_machine(r, port, mode, how):
    """One of three stands still between two outer steps. The others take the next ones; then it is let in, with its work."""
    members, trained = _machine(r, port, **MODES[mode])
    _until(trained, lambda: len(members.formed.machines) == 3)
    trained.steps(5)
    if r.rank == 2:
        r.say("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP) if how == "stopped" else r.hear("go on", timeout_s=DEADLINE_S)
        before = members.formed.number
        _until(trained, lambda: members.formed.number > before)
        report = trained.opt.report  # what stood in a message that the others have averaged does not count again
        assert report["late_samples"] + report["dropped_samples"] > 0
        assert report["dropped_samples"] == 0 or mode != "sync"
    else:
        _until(trained, lambda: len(members.formed.machines) == 2)
        assert trained.opt.report["late"] == ["machine2"]
        begun = trained.opt.report["outer_steps"]
        _until(trained, lambda: trained.opt.report["outer_steps"] >= begun + 4)
        if r.rank == 0:
            os.kill(int(r.hear("pid")), signal.SIGCONT) if how == "stopped" else r.say("go on")
        _until(trained, lambda: len(members.formed.machines) == 3)
        assert trained.opt.report["late"] == []
        assert trained.opt.report["late_samples"] == 0
    assert trained.lost == []  # step() never raised
    return trained.ends_with(members)


@pytest.mark.on(3, alike=True, timeout=DEADLINE_S, allow_exit={2: -signal.SIGKILL})
def test_goes_on_and_ends_without_machines_that_are_killed(r, port):
    """The loss of a machine raises nothing, in step() or in finish(), where a quorum is left."""
    members, trained = _machine(r, port, mode="sync")
    _until(trained, lambda: len(members.formed.machines) == 3)
    trained.steps(6)
    if r.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    outer = trained.outer()  # finish() meets the loss, or the end of the step before it did
    assert sorted(members.formed.machines) == ["machine0", "machine1"]
    assert trained.lost == []
    members.leave()
    return outer


@pytest.mark.on(4, alike=True, timeout=DEADLINE_S, allow_exit={2: -signal.SIGKILL, 3: -signal.SIGKILL})
def test_a_late_machine_is_waited_for_neither_at_a_loss_nor_at_the_end(r, port):
    """One of four hangs, and stays so: the loss of another one, and finish(), wait for its patience or time-out otherwise."""
    members, trained = _machine(r, port, mode="continue")
    _until(trained, lambda: len(members.formed.machines) == 4)
    if r.rank == 3:
        r.hear("ended", timeout_s=DEADLINE_S)
        os.kill(os.getpid(), signal.SIGKILL)
    _until(trained, lambda: len(members.formed.machines) == 3)
    if r.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    _until(trained, lambda: len(members.formed.machines) == 2)
    assert "machine3" in trained.opt.report["late"]
    outer = trained.outer()
    assert trained.lost == []
    r.say(f"finished{r.rank}")
    if r.rank == 0:
        r.hear("finished1")
        r.say("ended")
    members.leave()
    return outer


@pytest.mark.on(2, timeout=DEADLINE_S)
def test_refuses_a_quorum_that_cannot_be(r, port):
    members = join(port, f"machine{r.rank}", timeout=TIMEOUT)
    for options, says in (
        ({"quorum": 1}, r"quorum: expected 2 or more \(min_machines\), got 1"),
        ({"quorum": 2, "grace_s": 60}, r"grace_s: expected less than 60 \(the timeout\), got 60"),
    ):
        with pytest.raises(ValueError, match=f"DiLoCoX: {says}"):
            TrainingResult(members, r.rank, **options)
    members.leave()
