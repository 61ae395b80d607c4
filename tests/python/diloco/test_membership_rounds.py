"""How machines at a store agree on a group: who is waited for, and for how long."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from elastic_machine import TrainingResult, join
from membership_rounds import Beat, client, rounds_at
from site_rank import wait_until_stopped, wake

DEADLINE_S = 90


@pytest.fixture
def rounds(store):
    return rounds_at(store)


@pytest.mark.on(1, timeout=DEADLINE_S)
def test_finds_the_open_round(r, port):
    """The machine that closed a round died before it counted the round: the next machines find the open one themselves."""
    from torch.distributed import PrefixStore

    store = PrefixStore("lowcomm", dist.TCPStore("127.0.0.1", port, is_master=False))
    store.set("1/members", '["gone"]')
    store.add("1/entered", 1)
    formed = join(port, "only", min_machines=1).form()
    assert (formed.number, formed.machines) == (2, ("only",))


def test_a_round_closes_without_a_machine_that_has_left(rounds):
    """Machine b has entered a round and left; the others still count it among the living."""
    beat = Beat("abc", left="b")
    with ThreadPoolExecutor() as threads:
        first = threads.submit(rounds("a", beat).enter, 20.0)
        while not rounds("b", beat).waiting(0):
            assert not first.done()
        with pytest.raises(TimeoutError, match=r"expected 2 machines or more .* within 1 s .*, got \['a'\]"):
            rounds("b", beat, timeout_s=1.0).enter(20.0)  # there are two, but one has left
        assert not first.done()
        third = rounds("c", beat).enter(20.0)
        assert third == first.result() == (1, ["a", "c"])


def test_all_who_wait_longer_than_the_time_out_for_one_that_trains_are_in_its_group(rounds):
    beat = Beat("abx")
    beat.training = {"x"}
    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(rounds(name, beat, patience_s=0.2, timeout_s=0.5).enter, 20.0) for name in "ab"]
        time.sleep(2)
        assert not any(one.done() for one in waiting)
        comes = rounds("x", beat, patience_s=0.2, timeout_s=0.5).enter(20.0)
        assert sorted(comes[1]) == ["a", "b", "x"]
        assert [one.result() for one in waiting] == [comes, comes]


def test_the_time_out_counts_from_the_last_step_of_a_machine_that_is_lost(rounds):
    beat = Beat("ax")
    beat.training = {"x"}
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(rounds("a", beat, patience_s=0.2, timeout_s=2.0).enter, 20.0)
        time.sleep(3)
        beat.training, beat.machines = set(), {"a"}  # it is killed, and its launcher starts it again
        time.sleep(1)
        assert not waiting.done()
        beat.machines = {"a", "x"}
        assert rounds("x", beat, patience_s=0.2).enter(20.0) == waiting.result() == (1, ["a", "x"])


def test_another_one_closes_a_round_that_the_first_does_not_close(rounds):
    beat = Beat("abc")
    assert rounds("a", beat, min_machines=3).enter(0.3) is None  # and is not heard of again
    with ThreadPoolExecutor() as threads:
        others = [threads.submit(rounds(name, beat, min_machines=3, patience_s=0.5).enter, 20.0) for name in "bc"]
        assert {tuple(sorted(one.result()[1])) for one in others} == {("a", "b", "c")}


def test_who_has_withdrawn_is_nobody_that_waits(rounds):
    beat = Beat("ab")
    watching = rounds("b", beat)
    with pytest.raises(TimeoutError):
        rounds("a", beat, timeout_s=0.3).enter(20.0)
    assert not watching.waiting(0)
    entering = rounds("a", beat)
    assert entering.enter(0.1) is None
    assert watching.waiting(0)
    beat.machines = {"b"}
    assert not watching.waiting(0)


def test_a_group_that_a_round_has_passed_over_hears_of_it(rounds):
    """Machine d could hear of nobody, founded a group of its own, and is gone again when the others look."""
    both = Beat("ab")
    a, b = rounds("a", both), rounds("b", both)
    with ThreadPoolExecutor() as threads:
        entered = threads.submit(a.enter, 20.0)
        assert b.enter(20.0) == entered.result() and entered.result()[0] == 1
        assert not a.waiting(1)
        assert rounds("d", Beat("d"), min_machines=1).enter(20.0) == (2, ["d"])
        assert a.waiting(1) and b.waiting(1)
        entered = threads.submit(a.enter, 20.0)
        number, members = b.enter(20.0)
        assert (number, sorted(members)) == (3, ["a", "b"]) and (number, members) == entered.result()


@pytest.mark.parametrize("word", ['["a"]', None])
def test_a_newcomer_waits_for_the_last_group_that_connected(store, rounds, word):
    """Round 2 was closed of a and d, without b, and a died; then d did, perhaps before it knew. Machine b is in group 1."""
    for key, value in {
        "1/members": '["a", "b"]',
        "1/absent": "[]",
        "2/members": '["a", "d"]',
        "2/absent": word,
    }.items():
        if value is not None:
            store.set(key, value)
    b, new = (rounds(name, Beat(["b", "new"]), min_machines=1, patience_s=1.0) for name in ("b", "new"))
    with ThreadPoolExecutor() as threads:
        entered = threads.submit(new.enter, 20.0)
        time.sleep(2.0)
        assert not entered.done()
        assert b.enter(20.0) == entered.result() == (3, ["new", "b"])


@pytest.mark.parametrize("decided", [False, True])
def test_a_newcomer_waits_longer_for_a_group_that_has_not_connected_yet(store, rounds, decided):
    """Machines a and b may wait for one another in round 1 for the time-out, before they can let c in."""
    store.set("1/members", '["a", "b"]')
    if decided:
        store.set("1/absent", "[]")
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"expected \['a', 'b'\], alive and of the last group, to come or to train"):
        rounds("c", Beat("abc"), min_machines=1, timeout_s=1.0).enter(10.0)
    assert decided or time.monotonic() - began > 2.0


def test_a_round_that_two_machines_close_counts_once(store):
    """The second took the first for lost; each has the list of the first."""
    from torch_lowcomm.membership.round_store import RoundStore

    a, b, late = (RoundStore(client(store), name) for name in ("a", "b", "late"))
    assert [machine.take_place()[0] for machine in (a, b)] == [1, 1]
    assert a.close(1, ["a", "b"]) == b.close(1, ["b"]) == ["a", "b"]
    assert late.take_place()[0] == 2


@pytest.mark.on(3, timeout=DEADLINE_S)
def test_a_machine_whose_id_another_process_has_is_told(r, port):
    """A machine is stopped until another process has its id, and wakes up: it is told, and holds nobody up."""
    name = "b" if r.rank == 0 else "a"
    if r.rank == 2:
        wait_until_stopped(int(r.hear("formed", timeout_s=60)))
    members = join(port, name)
    if r.rank == 2:
        r.say("started again")
    else:
        members.form()
    if r.rank == 1:
        r.say("formed", os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(ConnectionError, match="lost the place of machine_id 'a'"):
            members.form()
        r.say("told")
        return
    if r.rank == 0:
        stopped = int(r.hear("formed"))
        r.hear("started again", timeout_s=60)
    formed = members.form()
    if r.rank == 0:
        wake(stopped)
        r.hear("told", timeout_s=60)
        assert not members.waiting()
        r.say("ended")
    r.hear("ended", timeout_s=60)
    assert sorted(formed.machines) == ["a", "b"]
    members.leave()


def test_a_machine_that_was_stopped_takes_nobody_for_lost(store):
    """While it does not look at the others they do not grow old for it."""
    from torch_lowcomm.membership.heartbeat import Heartbeat

    beats = {name: Heartbeat(client(store), name, lost_after_s=0.5) for name in "ab"}
    stopped, other = beats.values()
    deadline = time.monotonic() + DEADLINE_S
    while stopped.alive() != {"a", "b"} or not stopped.is_current():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    watch, wakes = stopped._watch, threading.Event()
    stopped._watch = lambda: (wakes.wait(), watch())
    time.sleep(1.5)
    assert not stopped.is_current() and stopped.alive() == {"a", "b"}
    other.stop()
    wakes.set()
    while stopped.alive() != {"a"}:
        assert time.monotonic() < deadline
    stopped.stop()
    with pytest.raises(ConnectionError, match="expected machine 'a' to be at the store, it has left"):
        stopped.is_current()


def test_a_machine_that_has_given_up_holds_nobody_up(rounds):
    """The first machine in a round gives up and lives on; the others form a group without it."""
    beat = Beat("abc")
    with pytest.raises(TimeoutError, match=r"expected 2 machines or more .* within 0\.3 s .*, got \['a'\]"):
        rounds("a", beat, timeout_s=0.3).enter(20.0)
    with ThreadPoolExecutor() as threads:
        others = [threads.submit(rounds(name, beat, patience_s=1.0).enter, 20.0) for name in "bc"]
        assert {tuple(sorted(one.result()[1])) for one in others} == {("b", "c")}


STEP_S = 0.4


@pytest.mark.slow
@pytest.mark.on(3, alike=True, timeout=DEADLINE_S)
def test_a_machine_that_comes_waits_while_the_others_train(r, port):
    """An interval is longer than patience and time-out: a machine that comes waits until those that train let it in."""
    deadlines = {"min_machines": 1, "patience_s": 1.0, "timeout": timedelta(seconds=2), "lost_after_s": 1.0}
    options = {"mode": "sync", "sync_every": 10}
    if r.rank == 2:
        r.hear("training")
        start = time.monotonic()
        members = join(port, "late", **deadlines)
        trained = TrainingResult(members, r.rank, **options)
        waited_s = time.monotonic() - start
        assert members.formed.number == 2, "it has founded no group of its own"
        assert waited_s > deadlines["timeout"].total_seconds(), "the test is about long intervals"
    else:
        members = join(port, f"machine{r.rank}", **(deadlines | {"min_machines": 2}))
        trained = TrainingResult(members, r.rank, **options)
        trained.steps(1)
        if r.rank == 0:
            r.say("training")
        while len(members.formed.machines) < 3:
            trained.steps(1, pause_s=STEP_S)
    assert sorted(members.formed.machines) == ["late", "machine0", "machine1"]
    while trained.opt.report["outer_steps"] < 6:
        trained.steps(1)
    outer = trained.outer()
    members.leave()
    assert not trained.lost
    return outer
