"""Seed replay when machines die, stop, wake up or are slow: the others go on and end with the same weights."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import ranks
from seed_replay_core import Machine, end_together, machines_by_iteration, machines_of

DEADLINE_S = 120
AT = 12  # the iteration in which it happens


def _wait_for_posts(machine, count):
    """Waits until so many machines have posted in iteration AT; fewer do if one of them has been dropped."""
    deadline = time.monotonic() + 10
    while machine.posted(AT) < count and time.monotonic() < deadline:
        time.sleep(0.01)


def _signal_around(machine, phase, signum):
    """Has this process get a signal when it comes to a phase of iteration AT."""
    exchange, core = machine.exchange, machine.core
    put, swap = exchange._store.set, exchange._store.swap

    def now(key, name):
        return core.iteration == AT and key.startswith(name)

    hits = []

    def hit():
        if not hits:  # woken up it comes by again, at the same iteration still
            hits.append(phase)
            os.kill(os.getpid(), signum)

    def putting(key, value):
        if phase == "before posting" and now(key, "m"):
            hit()
        put(key, value)
        if (phase == "after posting" and now(key, "m")) or (phase == "after telling" and now(key, "log")):
            hit()

    def swapping(key, expected, desired):
        if phase == "before writing the set" and now(key, "head"):
            hit()
        value = swap(key, expected, desired)
        if phase == "after writing the set" and now(key, "head"):
            assert value == desired, "not the last to come"
            hit()
        return value

    exchange._store.set, exchange._store.swap = putting, swapping
    last = phase in ("before writing the set", "after writing the set", "after telling")

    def step():
        message = machine.message()
        if last and core.iteration == AT:
            _wait_for_posts(machine, 2)  # this one is the last
        record = exchange.exchange(core, message, lr=1e-2, weight_decay=0.0)
        if phase == "before applying" and core.iteration == AT:
            hit()
        core.apply(record)
        if phase == "after applying" and core.iteration == AT + 1:
            hit()
        return record

    machine.step = step


@pytest.mark.later
@pytest.mark.parametrize(
    ("phase", "options"),
    [
        ("before posting", {}),
        ("before posting", {"deadline_least_s": 1000, "deadline_most_s": 1000}),  # a dead machine is not a slow one
        ("before writing the set", {}),
        ("after telling", {}),
        ("after applying", {}),
    ],
)
@pytest.mark.on(3, alike=True, timeout=DEADLINE_S, allow_exit={2: -signal.SIGKILL})
def test_goes_on_without_a_killed_machine(r, port, phase, options):
    machine = Machine(port, f"machine{r.rank}", min_machines=3, **options).join()
    if r.rank == 2:
        _signal_around(machine, phase, signal.SIGKILL)
    machine.until(AT + 10)
    machine.exchange.leave()
    there = machines_by_iteration(machine.core.log)
    assert sorted(there) == list(range(AT + 10)), "an iteration is lost"
    assert all(machine.exchange.machine in machines for machines in there.values()), "a survivor's message is lost"
    assert len(there[AT - 1]) == 3
    assert len(there[AT]) == (2 if phase == "before posting" else 3)
    assert len(there[AT + 1]) == 2
    return machine.core.checksum(), machine.core.log


@pytest.mark.later
@pytest.mark.on(2, alike=True, timeout=DEADLINE_S)
def test_drops_a_slow_machine_and_lets_it_in_again(r, port):
    """A machine that lives but is too slow is dropped, and comes in again."""
    machine = Machine(
        port, f"machine{r.rank}", min_machines=2, lost_after_s=1000, deadline_least_s=2, deadline_most_s=2
    )
    machine.join().until(AT)
    if r.rank == 1:
        time.sleep(5)
    ended = end_together(r, machine, lambda m: m.core.iteration > AT + 5 and m.exchange.stats()["machines"] == 2)
    assert len(machines_by_iteration(machine.core.log)[AT]) == 1
    return *ended, machine.core.log


def _is_stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.later
@pytest.mark.parametrize("phase", ["before posting", "after posting", "after writing the set", "before applying"])
@pytest.mark.on(3, alike=True, timeout=DEADLINE_S)
def test_a_machine_that_wakes_up_catches_up(r, port, phase):
    """The last machine is stopped until the others are two chunks further, and the keys of that time deleted."""
    machine = Machine(port, f"machine{r.rank}", min_machines=3, chunk=4).join()
    if r.rank == 2:
        _signal_around(machine, phase, signal.SIGSTOP)
        r.say("pid", os.getpid())
    elif r.rank == 0:
        pid = int(r.hear("pid", DEADLINE_S))
        while not _is_stopped(pid):  # it may have been too slow to be the last to come, and come to its phase late
            machine.step()
        machine.until(machine.core.iteration + 20)
        assert machine.exchange.stats()["machines"] == 2
        os.kill(pid, signal.SIGCONT)
    ended = end_together(r, machine, lambda m: m.exchange.stats()["machines"] == 3)
    there = machines_by_iteration(machine.core.log)
    assert len(there[AT + 2]) == 2
    assert len(there[max(there)]) == 3
    return *ended, machine.core.log


@pytest.mark.on(3, timeout=DEADLINE_S, allow_exit={0: -signal.SIGKILL, 1: -signal.SIGKILL})
def test_a_late_machine_takes_over(r, port):
    """All machines die; one that comes later takes the log up, and the run."""
    if r.rank == 2:
        r.hear("gone", DEADLINE_S)
        machine = Machine(port, "later", min_machines=1).join()
        assert machine.core.iteration == AT
        machine.until(AT + 5)
        assert machines_of(machine.step()) == [machine.exchange.machine]
        machine.exchange.leave()
        return
    machine = Machine(port, f"machine{r.rank}").join()
    if r.rank == 1:
        machine.until(AT)
        time.sleep(1.0)  # the other one has it too
        r.say("gone")
    else:
        machine.until(AT)
    os.kill(os.getpid(), signal.SIGKILL)


def _harassed(r, port, rounds, snapshot_every):
    """The last rank stops the machines at random, for shorter and longer than they wait for each other."""
    draw = random.Random(10 + r.rank)
    if r.rank == r.size - 1:
        pids = [int(r.hear(f"pid{q}", DEADLINE_S)) for q in range(r.rank)]
        for _ in range(rounds):
            stopped = draw.sample(pids, draw.randint(1, len(pids)))
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(draw.choice([0.01, 0.05, 0.3, 1.5]))
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
            time.sleep(draw.random() / 2)
        r.say("over")
        return None
    impatient = {"lost_after_s": 1.0, "deadline_factor": 2.0, "deadline_least_s": 0.2, "deadline_most_s": 0.5}
    options = impatient | {"min_machines": 1, "chunk": 4, "snapshot_every": snapshot_every}
    machine = Machine(port, f"machine{r.rank}", **options).join()
    r.say(f"pid{r.rank}", os.getpid())
    while not r.path("over").exists():
        machine.step()
        if draw.random() < 0.01:
            machine.exchange.leave()
            if draw.random() < 0.5:  # as a program that starts again, with the first weights
                machine = Machine(port, f"machine{r.rank}", **options)
            machine.join()
    machine.exchange.leave()
    machine.given |= {"deadline_least_s": 20.0, "deadline_most_s": 20.0, "lost_after_s": 10.0}
    machine.reach(port).join()
    return *end_together(r, machine, lambda m: m.exchange.stats()["machines"] == r.size - 1), machine.core.log


@pytest.mark.slow
@pytest.mark.parametrize("snapshot_every", [0, 8])
def test_machines_stopped_at_random_end_alike(store, snapshot_every):
    ends = ranks.run_ranks(_harassed, 4, store.port, 8, snapshot_every, timeout=DEADLINE_S)[:3]
    ranks.expect_alike([end[:2] for end in ends])
    if snapshot_every == 0:
        ranks.expect_alike(ends)
        there = machines_by_iteration(ends[0][2])
        assert sorted(there) == list(range(ends[0][0])), "an iteration is lost"


def _silence(exchange):
    """Ends the signs of life as the death of a process does, which has no time to say that it leaves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_lowcomm.membership.heartbeat._LEFT", "0")  # a number as any other
        exchange._beat.stop()


@pytest.mark.parametrize("silent", [False, True], ids=["alone", "displaced"])
@pytest.mark.on(1, timeout=DEADLINE_S)
def test_a_displaced_process_does_not_leave_for_its_successor(r, port, silent):
    """A process goes when another one has its place, for it was silent for long: or is there alone."""
    old = Machine(port, "same", min_machines=1, lost_after_s=0.5).join().until(3)
    new = old
    if silent:
        _silence(old.exchange)
        new = Machine(port, "same", min_machines=1, lost_after_s=0.5).join()
        assert new.core.iteration == 3
        new.until(5)
    mail = "lowcomm/replay/m1"
    posted = new.store.get(mail)
    old.exchange.leave()
    assert new.store.get(mail) == (posted if silent else b"left")
    if silent:
        new.until(7)
        assert new.exchange.stats()["void"] == 0
        new.exchange.leave()
    assert new.store.get(mail) == b"left"


@pytest.mark.on(2, timeout=DEADLINE_S)
def test_comparing_weights_does_not_cost_a_machine_its_place(r, port):
    """One machine compares weights, and the other one does not: it goes on at once, and waits for the first."""
    machine = (
        Machine(port, f"machine{r.rank}", min_machines=2, lost_after_s=10, deadline_least_s=6, deadline_most_s=6)
        .join()
        .until(AT)
    )
    if r.rank == 0:
        assert not machine.exchange.check(machine.core)
    machine.until(AT + 3)
    stats = machine.exchange.stats()
    r.meet_at("ended", DEADLINE_S)
    machine.exchange.leave()
    assert stats["void"] == stats["dropped"] == 0


@pytest.mark.on(2, timeout=60, allow_exit={1: -signal.SIGKILL})
def test_does_not_wait_for_a_dead_machines_checksum(r, port):
    """Compared with is who was in the last record: it may be dead since."""
    machine = (
        Machine(port, f"machine{r.rank}", min_machines=2, deadline_least_s=1000, deadline_most_s=1000).join().until(AT)
    )
    if r.rank == 1:
        r.hear("seen", DEADLINE_S)
        os.kill(os.getpid(), signal.SIGKILL)
    while "machine1" not in machine.exchange._beat.alive():
        time.sleep(0.01)
    r.say("seen")
    assert not machine.exchange.check(machine.core)
    machine.exchange.leave()


@pytest.mark.later
@pytest.mark.on(2, timeout=DEADLINE_S)
def test_who_takes_part_shows_a_sign_of_life(r, port):
    """One machine's heartbeat is not seen, but its messages are: those of one that has just come back, or whose beat is slow."""
    machine = Machine(port, f"machine{r.rank}", min_machines=2, lost_after_s=3, deadline_least_s=20).join().until(AT)
    if r.rank == 1:
        _silence(machine.exchange)
    machine.until(AT + 16, pause_s=0.4 * r.rank)  # this takes longer than lost_after_s
    assert machine.exchange.stats()["void"] == machine.exchange.stats()["dropped"] == 0
