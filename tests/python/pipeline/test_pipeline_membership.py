"""Stages of machines that regroup by lc.Membership: new stages with the old caches agree on what both sides remember."""

import os
import signal
import time
from datetime import timedelta

import pytest
import stages_case as case
import torch.distributed as dist

import torch_lowcomm as lc

STAGES = ("office-a", "office-b")  # machines in the order of their stages


def _joined(port, name):
    """The membership of a machine, whose id a machine that was killed may still have for a while."""
    while True:  # until the test's deadline
        try:
            return lc.Membership(
                dist.TCPStore("127.0.0.1", port, is_master=False),
                name,
                min_machines=2,
                lost_after_s=2.0,
                patience_s=30.0,
                timeout=timedelta(seconds=40),
            )
        except ValueError as error:
            assert "living machine" in str(error), error
            time.sleep(0.1)


class _Machine:
    """A machine with one stage and its cache: docs/pipeline.md has these lines."""

    def __init__(self, port, name, folder):
        self.members, self.name = _joined(port, name), name
        self.cache = lc.pipeline.Cache(folder=folder)
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False)

    def regroup(self):
        """A new process group of the machines that are there, and new stages with the old cache."""
        if dist.is_initialized():
            dist.destroy_process_group()
        formed = self.members.form()
        assert sorted(formed.machines) == sorted(STAGES)  # in the order in which they came
        store, rank = dist.PrefixStore(f"pipeline/{formed.number}", self.store), STAGES.index(self.name)
        dist.init_process_group("lowcomm", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
        self.schedule, _ = case.build(rank, 2, "1F1B", cache=self.cache, **case.CODED)

    def versions(self):
        """Of each sample, equal on both sides."""
        return [row[2] for row in case.equal_rows(self.cache.slots.rows(0, self.name == STAGES[0]))]


@pytest.mark.parametrize("keeps", [False, True], ids=["first visits without its memory", "changes with its files"])
@pytest.mark.on(3, timeout=150, allow_exit={1: -signal.SIGKILL})
def test_a_machine_that_comes_back(r, port, keeps):
    """Two machines regroup; then one is killed, and comes back as rank 2: without its memory, or with its files."""
    name = STAGES[min(r.rank, 1)]
    if r.rank == 2:
        r.hear("killed", 60)
    machine = _Machine(port, name, r.path(name) if keeps else None)
    if r.rank < 2:
        machine.regroup()
        case.step(machine.schedule)
        case.step(machine.schedule)
        assert machine.versions() == [2] * case.ROWS
        machine.regroup()
        case.step(machine.schedule)
        assert machine.versions() == [3] * case.ROWS, "both sides still remember"
        assert machine.cache.stats()["forgotten"] == {}
        machine.cache.flush()
        if r.rank == 1:
            r.say("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:
                case.step(machine.schedule)
        except (dist.DistBackendError, RuntimeError):
            pass
    machine.regroup()
    assert machine.members.formed.number == 3
    case.step(machine.schedule)
    stats = machine.cache.stats()
    if keeps:
        assert machine.versions() == [4] * case.ROWS
        assert (stats["forgotten"], stats["seen"] > 0) == ({}, True)
    else:
        assert machine.versions() == [1] * case.ROWS, "first visits on both sides"
        assert stats["forgotten"] == ({"differs": case.ROWS} if r.rank == 0 else {})
    dist.destroy_process_group()
    machine.members.leave()
