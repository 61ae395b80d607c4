"""Machines of several ranks (FSDP2) that come and go, and their checkpoints: one launcher a machine."""

import os
import signal
from datetime import timedelta

import pytest
import ranks
import seed_replay_sharded as cases
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

import torch_lowcomm as lc
from torch_lowcomm import _C

DEADLINE_S = 120


def _machine(r, ranks_before, size):
    """The mesh of a launcher of its own: ranks `ranks_before` to `ranks_before` + `size` of the test."""
    name = f"file://{r.folder}/machine{ranks_before}"
    dist.init_process_group(
        "lowcomm", init_method=name, rank=r.rank - ranks_before, world_size=size, timeout=timedelta(seconds=60)
    )
    return init_device_mesh("cpu", (size,))


def _exchange(port, name, **options):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    short = {"deadline_least_s": 1.0, "deadline_most_s": 10.0, "lost_after_s": 3.0}
    return lc.StoreExchange(store, name, **{**short, **options})


def _told(r, name):
    """Whether a note is there, as the machine's first rank sees it."""
    seen = torch.tensor([int(r.path(name).exists())])
    dist.broadcast(seen, 0)
    return bool(seen)


def _until(optimizer, model, machine, iteration):
    while optimizer.iteration < iteration:
        cases.step(model, optimizer, machine)


def _late(r, port, snapshots):
    """Machine 0, ranks 0 and 1, is joined by machine 1, ranks 2 and 3 with FSDP2, and by rank 4 with the whole model."""
    machine = min(r.rank // 2, 2)
    mesh = _machine(r, 2 * machine, 1 if machine == 2 else 2)
    options = {"chunk": 4, "snapshot_every": 4} if snapshots else {}
    exchange = _exchange(port, f"machine{machine}", **options)
    model = cases.Net() if machine == 2 else cases.sharded(mesh)
    optimizer = cases.optimizer_of(model, exchange=exchange)
    if machine == 0:
        _until(optimizer, model, machine, 14)
        if r.rank == 0:
            exchange._snapshots.finish(DEADLINE_S)
            r.say("trained")
        while not (_told(r, "target1") and _told(r, "target2")):
            cases.step(model, optimizer, machine)
    else:
        r.hear("trained", DEADLINE_S)
        optimizer.join()
        assert optimizer.iteration >= 14
        cases.step(model, optimizer, machine)
        if r.rank in (2, 4):
            r.say(f"target{machine}", optimizer.iteration + 20)
    targets = [int(r.hear(f"target{m}", DEADLINE_S)) for m in (1, 2)]
    _until(optimizer, model, machine, max(targets))
    assert optimizer.iteration == max(targets)
    told = cases.told(model, optimizer, [])
    r.meet_at("done", DEADLINE_S)
    optimizer.leave()
    return told, _C.read_replay_records(optimizer.core.log)[0]["iteration"]


@pytest.mark.later
@pytest.mark.parametrize("snapshots", [False, True], ids=["log", "snapshot"])
def test_late_machines_catch_up(store, snapshots):
    """By the log, or by a snapshot, which the first rank takes and shares out; whether the newcomer is sharded or not."""
    found = ranks.run_ranks(_late, 5, store.port, snapshots, timeout=DEADLINE_S)
    for one, first in found:
        assert one["checksum"] == found[0][0]["checksum"]
        assert all(torch.equal(value, found[0][0]["weights"][name]) for name, value in one["weights"].items())
        assert (first > 0) == snapshots or not snapshots
    assert [one["stats"]["sent_bytes"] > 0 for one, _ in found] == [True, False, True, False, True]


def _killed(r, port):
    machine = r.rank // 2
    mesh = _machine(r, 2 * machine, 2)
    model = cases.sharded(mesh)
    optimizer = cases.optimizer_of(model, exchange=_exchange(port, f"machine{machine}", min_machines=2))
    _until(optimizer, model, machine, 4)
    if r.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if r.rank == 2:
        with pytest.raises((dist.DistBackendError, RuntimeError)):
            _until(optimizer, model, machine, 10**6)
        optimizer.leave()
        return None
    _until(optimizer, model, machine, 12)
    told = cases.told(model, optimizer, [])
    optimizer.leave()
    return told, _C.read_replay_records(told["log"])[-1]["machines"]


def test_a_ranks_death_is_its_machines_and_the_others_go_on(store):
    found = ranks.run_ranks(_killed, 4, store.port, timeout=DEADLINE_S, allow_exit={3: -signal.SIGKILL, 2: 0})
    cases.expect_equal(found[0][0], found[1][0])
    assert len(found[0][1]) == 1, "the other machine takes no part any more"


@pytest.mark.on(4, alike=True, timeout=DEADLINE_S)
def test_what_the_first_rank_is_refused_all_ranks_raise(r, port):
    """Only the first rank talks to the store; what it is told there, all ranks of the machine raise."""
    machine = r.rank // 2
    mesh = _machine(r, 2 * machine, 2)
    model = cases.sharded(mesh)
    optimizer = cases.optimizer_of(model, exchange=_exchange(port, f"machine{machine}"), seed=machine)
    if machine == 0:
        optimizer.join()
        dist.barrier()
        if r.rank == 0:
            r.say("founded")
        r.hear("refused", DEADLINE_S)
        optimizer.leave()
        return None
    r.hear("founded", DEADLINE_S)
    with pytest.raises(ValueError) as error:
        optimizer.join()
    r.say("refused")
    assert "seed=0" in str(error.value) and "seed=1" in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("perturb", ["at-use", "in-place"])
@pytest.mark.on(2)
def test_a_folder_brings_a_machine_back(r, perturb):
    r.init()
    mesh = init_device_mesh("cpu", (2,))
    options = {"checkpoint": r.path("folder"), "snapshot_every": 2, "perturb": perturb}
    model = cases.sharded(mesh)
    optimizer = cases.optimizer_of(model, **options)
    for _ in range(5):
        cases.step(model, optimizer, 0)
    checksum = optimizer.core.checksum()
    again = cases.sharded(mesh)
    restored = cases.optimizer_of(again, **options)
    assert restored.iteration == 5
    assert restored.core.checksum() == checksum
    cases.step(again, restored, 0)
    checksum = restored.core.checksum()
    if r.rank == 0:  # the folder is that of a machine, whatever its ranks are
        alone = cases.optimizer_of(cases.Net(), **options)
        assert (alone.iteration, alone.core.checksum()) == (6, checksum)
    dist.barrier()
    model = cases.Net()
    optimizer = cases.optimizer_of(model, perturb=perturb)
    for _ in range(6):
        cases.step(model, optimizer, 0)
    assert checksum == optimizer.core.checksum()


@pytest.mark.on(2)
def test_states_and_snapshots(r):
    r.init()
    folder = r.path("dcp")
    mesh = init_device_mesh("cpu", (2,))
    model = cases.sharded(mesh)
    optimizer = cases.optimizer_of(model)
    for _ in range(3):
        cases.step(model, optimizer, 0)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    snapshot = optimizer.snapshot()
    whole = {name for name, _ in cases.Net().named_parameters()} if r.rank == 0 else set()
    assert set(snapshot["weights"]) == whole, "the first rank has the whole weights"
    cases.step(model, optimizer, 0)
    after = optimizer.core.checksum()
    optimizer.load_snapshot(snapshot)
    cases.step(model, optimizer, 0)
    assert optimizer.core.checksum() == after
    # The same in another process group's sharding, by torch.distributed.checkpoint.
    again = cases.sharded(mesh)
    second = cases.optimizer_of(again)
    state = {"model": again.state_dict(), "optimizer": second.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    again.load_state_dict(state["model"])
    second.load_state_dict(state["optimizer"])
    assert second.iteration == 3
    cases.step(again, second, 0)
    assert second.core.checksum() == after
    # A state that does not fit is refused on all ranks, and changes nothing.
    spoilt = second.snapshot()
    if r.rank == 0:
        spoilt["weights"]["into.bias"][0] += 1
    with pytest.raises(ValueError, match="expected weights with CRC-32C"):
        second.load_snapshot(spoilt)
    odd = second.state_dict()
    odd["replay"]["iteration"] += r.rank
    with pytest.raises(ValueError, match="state: expected the same on all ranks of a machine, got .* on ranks 0 and 1"):
        second.load_state_dict(odd)
    with pytest.raises(
        ValueError, match="snapshot: expected one with optimizer and weights on the machine's first rank"
    ):
        second.load_snapshot({})
    assert second.core.checksum() == after and second.iteration == 4
    with pytest.raises(ValueError, match="records: expected the same on all ranks of a machine"):
        second.replay(second.core.log if r.rank else b"")
