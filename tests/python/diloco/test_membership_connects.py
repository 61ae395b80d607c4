"""All machines of a closed round connect, or nobody does where one is gone since it entered."""

import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from membership_rounds import Beat, client, rounds_at

DEADLINE_S = 20  # below the time-out, after which a late machine is named anyway
TIMEOUT_S = 60


@pytest.fixture
def rounds(store):
    return functools.partial(rounds_at(store), timeout_s=TIMEOUT_S)


def test_nobody_connects_once_a_machine_is_seen_to_be_gone_by_one(rounds):
    """Machine b has entered and does not say that it connects. Machine a sees that it is gone, and c hears of it from a."""
    beats = {name: Beat("abc") for name in "abc"}
    with ThreadPoolExecutor() as threads:
        machines = {name: rounds(name, beats[name], patience_s=5.0) for name in "abc"}
        entered = [threads.submit(machine.enter, 20.0) for machine in machines.values()]
        number, members = entered[0].result()
        assert sorted(members) == ["a", "b", "c"]
        connecting = [threads.submit(machines[name].agree_to_connect, number, members) for name in "ac"]
        time.sleep(0.5)
        assert not any(one.done() for one in connecting)
        beats["a"].lost = {"b"}
        assert [one.result(DEADLINE_S) for one in connecting] == [["b"], ["b"]]
        assert machines["b"].agree_to_connect(number, members) == ["b"], (
            "the word is out, though all three have come by now"
        )
        for beat in beats.values():
            beat.machines = set("ac")
        again = [threads.submit(machines[name].enter, 20.0) for name in "ac"]
        number, members = again[0].result()
        assert (number, sorted(members)) == (2, ["a", "c"])
        assert [
            one.result() for one in [threads.submit(machines[n].agree_to_connect, number, members) for n in "ac"]
        ] == [[], []]


@pytest.fixture
def beats(store):
    """beats(name): a machine's real Heartbeat."""
    from torch_lowcomm.membership.heartbeat import Heartbeat

    made = []

    def make(name):
        made.append(Heartbeat(client(store), name, lost_after_s=2.0))
        return made[-1]

    yield make
    for beat in made:
        beat.stop()


@pytest.mark.parametrize("before", ["not seen", "gone"])
def test_a_machine_goes_off_alone_for_nobody_that_it_has_not_seen_yet(rounds, beats, before):
    """Machine b came, or came back, a moment ago: the one that closed the round has seen it, and machine a will."""
    if before == "gone":
        left = beats("b")
        left.stop()
        assert left.has_left("b")
    behind = beats("a")  # has looked at the others, and does not look again before the test says so
    watch, looks = behind._watch, threading.Event()
    behind._watch = lambda: watch() if looks.is_set() else setattr(behind, "_watched", time.monotonic())
    a, b = rounds("a", behind), rounds("b", beats("b"))
    assert ("b" in behind.gone()) == (before == "gone") and "b" not in behind.alive()
    with ThreadPoolExecutor() as threads:
        connecting = threads.submit(a.agree_to_connect, 1, ["a", "b"])
        time.sleep(0.5)
        assert not connecting.done()
        looks.set()
        assert b.agree_to_connect(1, ["a", "b"]) == connecting.result(DEADLINE_S) == []


@pytest.mark.parametrize("how", ["left", "silent"])
def test_nobody_connects_to_a_machine_that_goes(rounds, beats, how):
    """A machine that left, and one that died: its thread has ended and has not told so."""
    beat, going = beats("a"), beats("b")
    deadline = time.monotonic() + DEADLINE_S
    while "b" not in beat.alive():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with ThreadPoolExecutor() as threads:
        connecting = threads.submit(rounds("a", beat).agree_to_connect, 1, ["a", "b"])
        time.sleep(0.5)
        assert not connecting.done()
        if how == "silent":
            going._beat = lambda count: None
        else:
            going.stop()
        assert connecting.result(DEADLINE_S) == ["b"]


def test_nobody_connects_where_a_machine_has_died_and_come_back(rounds):
    """Machine b, as another process, is in the next round and will not connect in this one."""
    a, b = rounds("a", Beat("ab")), rounds("b", Beat("ab"))
    with ThreadPoolExecutor() as threads:
        entered = [threads.submit(machine.enter, 20.0) for machine in (a, b)]
        assert all(one.result() == entered[0].result() for one in entered)
        connecting = threads.submit(a.agree_to_connect, 1, ["a", "b"])
        assert rounds("b", Beat("ab")).enter(0.2) is None
        assert connecting.result(DEADLINE_S) == ["b"]


def test_a_machine_that_does_not_say_that_it_connects_is_named(rounds, caplog):
    assert rounds("a", Beat("ab"), timeout_s=0.5).agree_to_connect(1, ["a", "b"]) == ["b"]
    assert "group 1: ['b'] do not connect" in caplog.text
