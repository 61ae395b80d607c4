"""Seed replay at a store, in real processes over a real TCPStore: the plain run, late machines, and what the log holds."""

import collections
import os
import re
import signal
import threading
import time
from datetime import timedelta

import pytest
import ranks
import torch
import torch.distributed as dist
from seed_replay_core import OPTIONS, Machine, end_together

from torch_lowcomm import _C
from torch_lowcomm.membership.patient_store import PatientStore
from torch_lowcomm.seed_replay import ReplayMismatch, StoreExchange
from torch_lowcomm.seed_replay.store.commit import Commit

DEADLINE_S = 120
PATIENT = {"lost_after_s": 10.0, "deadline_least_s": 20.0}  # nobody is dropped for being slow


def _counted(r, port, iterations, samples):
    machine = Machine(port, f"office-{r.rank}", min_machines=r.size, samples=samples, lost_after_s=60.0).join()
    machine.until(iterations)
    sent = machine.exchange.stats()["sent_bytes"]
    r.meet_at("ended", DEADLINE_S)
    machine.exchange.leave()
    return sent


@pytest.mark.parametrize(("samples", "most"), [(4, 40), (1, 160)])
def test_what_a_gradient_sends(store, samples, most):
    """All that machines with names send to the store, joining and asking for news too, a gradient of all machines."""
    size, iterations = 4, 140
    sent = ranks.run_ranks(_counted, size, store.port, iterations, samples, timeout=DEADLINE_S)
    assert sum(sent) / (iterations * size * samples) <= most, sent


def test_what_is_agreed_is_short():
    """Machines that are the record's are not named again; those let in, and those of no record, are."""
    core = _C.SeedReplay([("weight", torch.zeros(4), True, 0)], OPTIONS)
    record = core.record([core.message(m, [0.5]) for m in (7, 2**64 - 1)], lr=0.1, weight_decay=0.0)
    assert len(Commit(0, record, (7, 2**64 - 1), 2, 7).encode()) == 18 + len(record)
    for agreed in (
        Commit(-1, b"", (7, 2**64 - 1), 3, 2**64 - 1),
        Commit(2**40, b"no record", (5,), 70_000, 5, 2),
        Commit(0, record, (7, 2**64 - 1), 2, 2**64 - 1),
        Commit(0, record, (7, 2**64 - 1, 3), 3, 7),
    ):
        assert Commit.decode(agreed.encode()) == agreed
    for short in (b"", b"x" * 17, Commit(1, b"", (7,), 1, 7).encode()[:20]):
        with pytest.raises(ValueError, match="expected what machines agreed on, got"):
            Commit.decode(short)


@pytest.mark.parametrize("chunk", [8, 256])
@pytest.mark.on(4, alike=True, timeout=DEADLINE_S)
def test_lets_two_late_machines_in_at_once(r, port, chunk):
    """Two machines come at once when two are at it, with the first weights: they download bytes, and no weights."""
    if r.rank >= 2:
        r.hear("begun", DEADLINE_S)
    machine = Machine(port, f"machine{r.rank}", chunk=chunk, **PATIENT).join()
    if r.rank >= 2:
        assert machine.core.iteration >= 30
    else:
        machine.until(30)
        if r.rank == 0:
            r.say("begun")
    ended = end_together(r, machine, lambda m: m.exchange.stats()["machines"] == 4)
    stats = machine.exchange.stats()
    assert stats["void"] == stats["dropped"] == 0 < stats["received_bytes"]
    return ended, machine.core.log


def _keys(store):
    """By what comes before the first number, with how many there are of each."""
    names = (key.strip("/").removeprefix("lowcomm/replay/") for key in store.list_keys())
    return collections.Counter(re.sub(r"[0-9].*|(?<=beat/).*", "", name).rstrip("/") for name in names)


def _watched(r, port):
    machine = Machine(port, f"machine{r.rank}", chunk=4).join()
    counts = []
    for iteration in (20, 60, 100):
        machine.until(iteration)
        r.meet_at(f"at {iteration}", DEADLINE_S)
        counts.append(_keys(machine.store))
        r.meet_at(f"counted at {iteration}", DEADLINE_S)
    machine.exchange.leave()
    return counts, machine.core.log


def test_keys_stay_few(store):
    """Except for the chunks, of which there is one for every so many iterations: they are the log."""
    ends = ranks.run_ranks(_watched, 2, store.port, timeout=DEADLINE_S)
    known = {
        "agreed",
        "beat",
        "chunk",
        "description",
        "founded",
        "head",
        "id",
        "ids",
        "log",
        "m",
        "p",
        "name",
        "names",
        "ask",
        "asks",
    }
    for counts, _ in ends:
        for count in counts:
            assert set(count) <= known
            assert count["log"] <= 4 * 3 + 1
        grown = counts[2] - counts[0]
        assert set(grown) <= {"chunk", "log", "p"}
        assert grown["p"] <= 2, "those of the iteration under way"
        assert grown["chunk"] == 2 * 20
    chunks = [store.get(f"lowcomm/replay/chunk/{number}/0") for number in range(24)]
    assert ends[0][1].startswith(b"".join(chunks))


@pytest.mark.parametrize("shared", [False, True], ids=["store", "folder"])
@pytest.mark.on(3, alike=True, timeout=DEADLINE_S)
def test_snapshots_bound_the_log(r, port, tmp_path, shared):
    """A machine comes with the first weights when the log begins later: it takes a snapshot."""
    folder = str(tmp_path) if shared else None
    options = {"chunk": 4, "snapshot_every": 8, "snapshots": folder}
    if r.rank == 2:
        r.hear("begun", DEADLINE_S)
        machine = Machine(port, "late", **options).join()
        assert _C.read_replay_records(machine.core.log)[0]["iteration"] >= 8
    else:
        machine = Machine(port, f"machine{r.rank}", **options).join()
        machine.until(50, pause_s=0.02)  # so that one snapshot has arrived before the next
        machine.exchange._snapshots.finish(30)
        r.say(f"done{r.rank}")
        r.hear(f"done{1 - r.rank}", DEADLINE_S)
        if r.rank == 0:
            assert _keys(machine.store)["snapshot"] == (1 + 2 if folder else 1 + 2 * 3)
            assert not machine.store.check(["lowcomm/replay/chunk/0"])
            assert machine.store.check(["lowcomm/replay/chunk/11"])
            r.say("begun")
    ended = end_together(r, machine, lambda m: m.exchange.stats()["machines"] == 3)
    r.meet_at("left", DEADLINE_S)
    assert len(list(tmp_path.iterdir())) == (2 if shared else 0)
    return ended


@pytest.mark.parametrize("resync", [False, True])
@pytest.mark.on(2, alike=True, timeout=DEADLINE_S)
def test_other_weights_are_named_or_set_to_a_snapshot(r, port, resync):
    """Something writes to one machine's weights."""
    options = {
        "chunk": 4,
        "snapshot_every": 8,
        "resync": resync,
        "deadline_least_s": 20,
    }  # each waits for the other's sum
    machine = Machine(port, f"machine{r.rank}", **options).join()
    machine.until(10)
    before = machine.validation()
    while machine.store.get("lowcomm/replay/snapshot") is None:
        pass
    if r.rank == 1:
        machine.weight += 1.0
    machine.until(12)
    if not resync:
        with pytest.raises(ReplayMismatch, match="expected the same weights as machine 'machine[01]' at iteration 12"):
            machine.exchange.check(machine.core)
        return machine.core.iteration
    assert machine.exchange.check(machine.core)
    assert machine.core.iteration == 12
    assert machine.validation() < 1.1 * before
    machine.until(20)
    assert not machine.exchange.check(machine.core)
    machine.exchange.leave()
    return machine.core.checksum()


@pytest.mark.parametrize(
    ("iteration", "error", "says"),
    [
        (3, ReplayMismatch, "expected the others' weights of iteration 4, with checksum 0x.*, got 0x"),
        (100_000, ValueError, "got some of iteration 100000: another run needs a store"),
    ],
)
@pytest.mark.on(2, timeout=DEADLINE_S)
def test_refuses_weights_of_another_iteration(r, port, iteration, error, says):
    if r.rank == 0:
        machine = Machine(port, "first", min_machines=1, chunk=4).join()
        machine.until(20)
        r.say("begun")
        while not r.path("refused").exists():
            machine.step()
        machine.exchange.leave()
        return
    r.hear("begun", DEADLINE_S)
    machine = Machine(port, "second", min_machines=1, chunk=4)
    machine.core.iteration = iteration
    with pytest.raises(error, match=says):
        machine.join()
    r.say("refused")


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"machine_id": ""}, ValueError, "machine_id: expected a text that is not empty"),
        ({"store": None}, TypeError, "store: expected a torch.distributed.Store, got NoneType"),
        ({"min_machines": 0}, ValueError, "min_machines: expected an integer of 1 or more, got 0"),
        ({"snapshot_every": 3}, ValueError, "snapshot_every: expected a multiple of chunk, 256, got 3"),
        ({"deadline_most_s": 1}, ValueError, "deadline_most_s: expected deadline_least_s, 5.0, or more, got 1"),
        ({"lost_after_s": 0}, ValueError, "lost_after_s: expected a number above 0, got 0"),
    ],
)
def test_refuses(store, arguments, error, says):
    given = {"store": store, "machine_id": "a"} | arguments
    with pytest.raises(error, match=says):
        StoreExchange(given.pop("store"), given.pop("machine_id"), **given)


@pytest.mark.on(1, timeout=DEADLINE_S)
def test_names_misuse_and_enters_again(r, port):
    machine = Machine(port, "only", min_machines=1)
    with pytest.raises(RuntimeError, match=r"expected join\(\) before the first iteration"):
        machine.step()
    machine.join()
    with pytest.raises(RuntimeError, match=r"expected leave\(\) before another join"):
        machine.join()
    with pytest.raises(ValueError, match="expected one of machine [0-9]+ and iteration 0, got one of machine 5 and"):
        machine.exchange.exchange(machine.core, machine.core.message(5, [1.0]), lr=1.0, weight_decay=0.0)
    machine.until(3)
    machine.exchange.leave()
    machine.join().until(6)
    machine.exchange.leave()
    machine.exchange.leave()


@pytest.mark.on(1, timeout=DEADLINE_S)
def test_names_who_is_there(r, port):
    with pytest.raises(TimeoutError, match=r"expected 2 machines or more to begin with, got \['only'\] in 1 s"):
        Machine(port, "only", timeout=timedelta(seconds=1)).join()


@pytest.mark.on(2, timeout=DEADLINE_S)
def test_the_longest_members_learning_rate_counts(r, port):
    """A late machine has missed a scheduler's steps: the others' learning rate counts, until they are gone."""
    if r.rank == 1:
        r.hear("begun", DEADLINE_S)
    machine = Machine(port, f"machine{r.rank}", min_machines=1)
    machine.lr = 2.0 ** -(7 + r.rank)
    machine.join()
    if r.rank == 0:
        machine.until(5)
        r.say("begun")
        while machine.exchange.stats()["machines"] < 2:
            machine.step()
        machine.until(machine.core.iteration + 10)
        r.say("leaving", machine.core.iteration)
        machine.exchange.leave()
        return
    while not r.path("leaving").exists():
        machine.step()
    machine.until(int(r.hear("leaving", DEADLINE_S)) + 5)
    machine.exchange.leave()
    steps = [(record["lr"], len(record["machines"])) for record in _C.read_replay_records(machine.core.log)]
    both = [lr for lr, machines in steps if machines == 2]
    assert set(both) == {2.0**-7} and len(both) >= 10
    assert steps[-1] == (2.0**-8, 1)


@pytest.mark.on(2, timeout=DEADLINE_S)
def test_a_stopped_process_has_not_lost_the_store(r, port):
    """Stopped for longer than the store's answers may take: that is no loss of the store."""
    if r.rank == 1:
        pid = int(r.hear("pid", DEADLINE_S))
        time.sleep(3.0)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.5)
        dist.TCPStore("127.0.0.1", port, is_master=False).set("lowcomm/replay/late", "there")
        return
    keys = PatientStore(dist.PrefixStore("lowcomm/replay", dist.TCPStore("127.0.0.1", port, is_master=False)), 1.0)
    r.say("pid", os.getpid())
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    assert keys.wait_for("late", 1.0) in (None, b"there")
    assert keys.wait_for("late", 10.0) == b"there"


@pytest.mark.on(2, timeout=DEADLINE_S)
def test_ends_cleanly_without_a_goodbye(r, port):
    machine = Machine(port, f"machine{r.rank}", chunk=4, snapshot_every=4).join()
    machine.until(8)
