"""The agreement of a seed replay's machines at the store: an iteration's record, values of any size, deadlines."""

import os
import time

import pytest
import torch.distributed as dist

from torch_lowcomm.membership.patient_store import PatientStore
from torch_lowcomm.seed_replay.store.commit import Commit
from torch_lowcomm.seed_replay.store.founding import Founding
from torch_lowcomm.seed_replay.store.head import Head
from torch_lowcomm.seed_replay.store.log import RunLog
from torch_lowcomm.seed_replay.store.member import Pace


def _head(store):
    keys = PatientStore(dist.PrefixStore("lowcomm/replay", store.clone()), 10.0)
    return Head(keys, RunLog(keys, 4, Founding(0, 0, (1, 2), 2, 1, False)))


def test_an_iteration_is_agreed_on_once(store):
    """A machine that was stopped before its compare_set loses it, however late it is and whatever was deleted since."""
    late, other = _head(store), _head(store)
    for iteration in range(9):
        assert other.propose(Commit(iteration, b"theirs", (1,), 2, 1))
        store.delete_key(f"lowcomm/replay/log/{iteration - 1}")
    assert not late.propose(Commit(0, b"mine", (1, 2), 2, 2))
    assert late.commit == other.commit == Commit(8, b"theirs", (1,), 2, 1)
    assert late.propose(Commit(9, b"mine", (1, 2), 2, 2))
    assert not other.propose(Commit(9, b"theirs", (1,), 2, 1))
    assert other.commit.record == b"mine"


def test_a_set_that_nobody_told_of_is_found(store):
    """It was moved by a machine that died before it set the log's key."""
    first, second = _head(store), _head(store)
    store.set("lowcomm/replay/head", Commit(0, b"theirs", (1,), 2, 1).encode())
    assert not first.wait(0, 0.05)
    first.look()
    assert first.commit.record == b"theirs"
    assert second.wait(0, 5.0), "it was not put to the log"
    assert second.commit == first.commit


def test_values_of_any_size(store):
    keys = PatientStore(store.clone(), 10.0)
    for size in (0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 9 << 20):
        value = os.urandom(size)
        keys.put_large("large", value, first=size)
        told, found = keys.find_large("large")
        assert found == value and told == {"bytes": size, "first": size}
        keys.delete_large_later("large", size)
        assert keys.find_large("large") is None
    assert keys.find_all(["one", "large/0"]) == [None, None]
    with pytest.raises(ValueError, match="one: expected less than 8388608 bytes, got 8388608"):
        keys.set("one", bytes(8 << 20))
    keys.set("one", b"1")
    assert keys.find_all(["one", "two"]) == [b"1", None]


def test_the_deadline_follows_measured_iterations(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    pace = Pace(4.0, 5.0, 300.0)
    assert pace.deadline_s == 300.0
    for took in (10.0, 10.0, 10.0):
        pace.committed()
        clock[0] += took
    pace.committed()
    assert pace.deadline_s == pytest.approx(40.0)
    clock[0] += 20.0
    pace.committed()
    assert pace.deadline_s == pytest.approx(4 * (0.75 * 10 + 0.25 * 20))
    pace.interrupted()
    clock[0] += 1e6  # away: no measurement
    pace.committed()
    assert pace.deadline_s == pytest.approx(50.0)
    for _ in range(50):
        clock[0] += 0.01
        pace.committed()
    assert pace.deadline_s == 5.0
    for _ in range(50):
        clock[0] += 1000.0
        pace.committed()
    assert pace.deadline_s == 300.0
