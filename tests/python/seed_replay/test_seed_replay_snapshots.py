"""Snapshots of a seed replay at a store: machines that write them die, stop, or come back when the run has gone on."""

import json
import re
import threading
import time

import pytest
import ranks
import seed_replay_model
import torch.distributed as dist
from kept_log import kept_log
from seed_replay_core import EXCHANGE, Machine, end_together
from torch.distributed import PrefixStore

from torch_lowcomm import _C
from torch_lowcomm.membership.patient_store import PatientStore
from torch_lowcomm.seed_replay import StoreExchange
from torch_lowcomm.seed_replay.store.snapshots import Snapshots

DEADLINE_S = 120


def _kept(machine):
    """Iterations of the snapshots that machines take."""
    return [told["iteration"] for told in json.loads(machine.store.get("lowcomm/replay/snapshot"))]


def _wait_for_others(machine, seconds):
    """Before it drops a machine, and before it proposes in the place of one that posted as the last."""
    pace = machine.exchange._pace
    pace._least_s = pace._most_s = seconds
    pace._mean_s = seconds / 2


DAMAGES = {
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "a flipped bit": lambda data: (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
    ),
}


@pytest.mark.parametrize("names", ["snapshot-4.pt", "log-4.bin", "snapshot-8.pt", "snapshot-4.pt log-8.bin"])
@pytest.mark.parametrize("how", DAMAGES)
def test_a_machine_starts_where_one_way_to_its_iteration_is_whole(tmp_path, how, names):
    """A damaged last log loses what it held: the machine begins at the last snapshot or behind it."""
    model, optimizer = seed_replay_model.machine(checkpoint=tmp_path, snapshot_every=4)
    seed_replay_model.train(model, optimizer, 10)
    checksum = optimizer.core.checksum()
    for name in names.split():
        (tmp_path / name).write_bytes(DAMAGES[how]((tmp_path / name).read_bytes()))
    if "log-8.bin" in names and how == "a flipped bit":
        with pytest.raises(ValueError):
            seed_replay_model.machine(checkpoint=tmp_path, snapshot_every=4)
        return
    with kept_log() as said:
        _, again = seed_replay_model.machine(checkpoint=tmp_path, snapshot_every=4)
    if "log-8.bin" in names:
        assert 8 <= again.iteration < 10
    else:
        assert again.iteration == 10 and again.core.checksum() == checksum
    if names == "snapshot-4.pt":
        assert f"iteration 4 of {tmp_path}: skipped: SeedReplay: " in said[0]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_machine_with_no_whole_snapshot_says_which_file_is_damaged(tmp_path, how):
    model, optimizer = seed_replay_model.machine(checkpoint=tmp_path, snapshot_every=4)
    seed_replay_model.train(model, optimizer, 10)
    for name in ("snapshot-4.pt", "snapshot-8.pt"):
        (tmp_path / name).write_bytes(DAMAGES[how]((tmp_path / name).read_bytes()))
    with pytest.raises(
        ValueError, match=r"snapshot-8.pt: expected a snapshot, got a damaged file|expected weights with CRC"
    ):
        seed_replay_model.machine(checkpoint=tmp_path, snapshot_every=4)


@pytest.mark.on(4, alike=True, timeout=DEADLINE_S)
def test_a_leader_that_was_away_leaves_snapshots_and_log_alone(r, port):
    """The leader of the iteration before a snapshot is busy elsewhere until the others have made two later ones."""
    options = {"chunk": 4, "snapshot_every": 4}
    if r.rank == 3:
        r.hear("back", DEADLINE_S)
        machine = Machine(port, "late", **options).join()
        _wait_for_others(machine, 3)
        assert _C.read_replay_records(machine.core.log)[0]["iteration"] >= 8
        return end_together(r, machine, None)
    machine = Machine(port, f"machine{r.rank}", min_machines=3, **options).join()
    _wait_for_others(machine, 60)  # as long as a leader takes on a busy machine
    machine.until(3)
    if r.rank != 2:
        _wait_for_others(machine, 60)
        machine.step()
        _wait_for_others(machine, 3)
        machine.until(30, pause_s=0.02)  # so that a snapshot has arrived before the next
        machine.exchange._snapshots.finish(30)
        r.say(f"ahead{r.rank}")
        r.hear("looked", DEADLINE_S)
    else:
        while machine.posted(3) < 2:
            time.sleep(0.01)
        machine.step()  # as the last
        assert machine.exchange._head.commit.leader == machine.exchange.machine
        for other in range(2):
            r.hear(f"ahead{other}", DEADLINE_S)
        kept = _kept(machine)
        enter = machine.exchange._member.join

        def entering(core):
            machine.exchange._snapshots.finish(30)
            assert _kept(machine) == kept
            assert machine.store.check([f"lowcomm/replay/chunk/{kept[0] // 4}"])
            r.say("looked")
            return enter(core)

        machine.exchange._member.join = entering
        _wait_for_others(machine, 3)
        machine.step()
        r.say("back")
    return end_together(r, machine, lambda m: m.exchange.stats()["machines"] == 4)


VALUE = 2 << 20  # bytes of a snapshot, in two pieces


class Weights:
    """The content of snapshots: an iteration, and bytes that are all alike."""

    def __init__(self, iteration, fill):
        self.iteration, self.value = iteration, bytes([fill]) * VALUE

    def checksum(self):
        return self.value[0]

    def load(self, value):
        assert set(value) == {value[0]} and len(value) == VALUE
        self.iteration, self.value = value[0], value


class Writer:
    """A machine that makes snapshots of every fourth iteration, and lists the iterations before which it forgets the log."""

    def __init__(self, store, folder=None):
        self.store = store
        self.snapshots = Snapshots(lambda: PatientStore(PrefixStore("run", store.clone()), 20.0), 4, folder)
        self.forgot = []

    def write(self, iteration, fill=None):
        """Begins to write weights whose bytes are `fill`."""
        weights = Weights(iteration, fill or iteration)
        self.snapshots.attach(lambda: weights.value, weights.load)
        self.snapshots.write(weights, 0, lambda store, before: self.forgot.append(before))
        return self

    def end(self):
        self.snapshots.finish(20)
        self.snapshots._store.find("none")  # comes after what is to be deleted
        return self

    def at_piece(self, piece, iteration, then):
        """Does something before it puts a piece of an iteration's weights to the store."""
        client = self.snapshots._client

        def clients():
            store = client()
            put = store.set

            def putting(key, value):
                if key == f"snapshot/{iteration}/{piece}":
                    then()
                put(key, value)

            store.set = putting
            return store

        self.snapshots._client = clients
        return self

    def take(self):
        """The iteration of what a machine gets that comes now."""
        weights = Weights(0, 0)
        self.snapshots.attach(lambda: b"", weights.load)
        taken = self.snapshots.take(PatientStore(PrefixStore("run", self.store.clone()), 20.0), weights, after=0)
        return weights.iteration if taken else None


def _listed(store):
    return [told["iteration"] for told in json.loads(store.get("run/snapshot"))]


def _with_keys(store):
    """Iterations of which a key is there."""
    keys = (re.match("/?run/snapshot/([0-9]+)", key) for key in store.list_keys())
    return sorted({int(key.group(1)) for key in keys if key})


def test_a_slow_snapshot_is_dropped_when_there_is_a_later_one(store):
    halfway, go = threading.Event(), threading.Event()

    def wait():
        halfway.set()
        assert go.wait(DEADLINE_S)

    Writer(store).write(4).end()
    slow = Writer(store).at_piece(1, 8, wait).write(8)
    assert halfway.wait(DEADLINE_S)
    quick = Writer(store).write(12).end()
    assert _listed(store) == [4, 12]
    go.set()
    slow.end()
    assert _listed(store) == _with_keys(store) == [4, 12]
    assert (quick.forgot, slow.forgot) == ([4], [])
    assert Writer(store).take() == 12


def test_a_machine_takes_the_snapshot_before_a_damaged_one(store, tmp_path):
    writer = Writer(store, tmp_path)
    writer.write(4).end()
    writer.write(8).end()
    (tmp_path / "snapshot-8.pt").write_bytes(b"damaged")
    with kept_log() as said:
        assert Writer(store, tmp_path).take() == 4
    assert "expected weights of iteration 8" in said[0]
    (tmp_path / "snapshot-4.pt").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="expected weights of iteration 4"):
        Writer(store, tmp_path).take()


def test_of_two_writers_of_a_snapshot_one_writes(store):
    second = Writer(store)
    first = Writer(store).at_piece(1, 4, lambda: second.write(4, fill=5).end())
    first.write(4).end()
    assert _listed(store) == _with_keys(store) == [4]
    assert Writer(store).take() == 4


def _fail():
    raise ConnectionError("the machine is gone")


@pytest.mark.parametrize("shared", [False, True], ids=["store", "folder"])
def test_what_died_machines_began_is_deleted(store, tmp_path, shared):
    """With the snapshot that was listed before, and not earlier."""
    folder = tmp_path if shared else None
    expected = {4: [4], 8: [4, 8], 12: [8, 12], 16: [8, 12, 16], 20: [12, 16, 20], 24: [20, 24]}
    for iteration, there in expected.items():
        if iteration not in (4, 16):
            Writer(store, folder).write(iteration).end()
        elif shared:
            store.set(f"run/snapshot/{iteration}/by", "a dead machine")
            (folder / f"snapshot-{iteration}.part").touch()
        else:
            Writer(store).at_piece(1, iteration, _fail).write(iteration).end()
        assert _with_keys(store) == there
        if shared:
            assert sorted(int(re.sub("[^0-9]", "", path.name)) for path in folder.iterdir()) == there


def _at_another_store(r, ports):
    """Machines go on at another store until it has two snapshots."""
    options = {"chunk": 4, "snapshot_every": 8}
    machine = Machine(ports[0], f"machine{r.rank}", **options).join()
    machine.until(20, pause_s=0.02)
    machine.exchange.leave()
    assert _C.read_replay_records(machine.core.log)[0]["iteration"] >= 8
    machine.reach(ports[1]).join()
    machine.until(21)
    r.meet_at("begun", DEADLINE_S)
    source = json.loads(machine.store.get("lowcomm/replay/founded"))["source"]
    earlier = [f"lowcomm/replay/earlier/{source}{piece}" for piece in ("", "/0")]
    if r.rank == 0:
        assert machine.store.check(earlier)
    r.meet_at("checked", DEADLINE_S)
    machine.until(60, pause_s=0.02)
    machine.exchange.leave()  # which ends what it was writing and deleting
    r.meet_at("ended", DEADLINE_S)
    while any(machine.store.check([key]) for key in earlier):  # until the test's deadline
        time.sleep(0.05)
    assert _C.read_replay_records(machine.core.log)[0]["iteration"] >= 48
    return machine.core.checksum()


def test_the_log_of_another_store_goes_with_the_chunks(store):
    again = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends = ranks.run_ranks(_at_another_store, 2, [store.port, again.port], timeout=60)
    assert len(set(ends)) == 1


@pytest.mark.on(2, alike=True, timeout=DEADLINE_S)
def test_machines_go_on_from_both_sides_of_a_checkpoint(r, port, tmp_path):
    """Two machines were killed, one just after a snapshot and one just before; they go on at a store."""
    options = {"checkpoint": tmp_path / str(r.rank), "snapshot_every": 4}
    seed_replay_model.train(*seed_replay_model.machine(**options), 8 - r.rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    exchange = StoreExchange(store, f"machine{r.rank}", **EXCHANGE)
    model, optimizer = seed_replay_model.machine(exchange=exchange, **options)
    assert optimizer.iteration == 8 - r.rank
    optimizer.join()
    assert optimizer.iteration == 8
    seed_replay_model.train(model, optimizer, 4)
    optimizer.leave()
    return optimizer.iteration, optimizer.core.checksum()
