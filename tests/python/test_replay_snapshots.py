"""Snapshots of a seed replay at a store: machines that write them die, stop, or come back when the run has gone on."""

import json
import time

import pytest
import ranks
import torch.distributed as dist
from replay_core import Machine, end_together

from torch_lowcomm import _C
from torch_lowcomm.replay.parameters import machine_number

DEADLINE_S = 120


@pytest.fixture
def store():
    """The store that outlives all machines."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _kept(machine):
    """Iterations of the snapshots that machines take."""
    return [told["iteration"] for told in json.loads(machine.store.get("lowcomm/replay/snapshot"))]


def _posted(machine, iteration, name):
    mail = machine.store.get(f"lowcomm/replay/mail/{machine_number(name)}")
    return len(mail) > 8 and _C.read_replay_message(mail[8:])[1] == iteration


def _away(r, port):
    """The closer of the iteration before a snapshot is busy elsewhere until the others have made two later ones."""
    options = {"chunk": 4, "snapshot_every": 4, "deadline_least_s": 3, "deadline_most_s": 3}
    if r.rank == 3:
        r.hear("back", DEADLINE_S)
        machine = Machine(port, "late", **options).join()
        assert _C.read_replay_records(machine.core.log)[0]["iteration"] >= 8
        return end_together(r, machine, None)
    machine = Machine(port, f"machine{r.rank}", least=3, **options).join()
    machine.until(3)
    if r.rank != 2:
        machine.until(30, pause_s=0.02)  # so that a snapshot has arrived before the next
        machine.exchange._snapshots.finish(30)
        r.say(f"ahead{r.rank}")
        r.hear("looked", DEADLINE_S)
    else:
        while not all(_posted(machine, 3, f"machine{other}") for other in range(2)):
            time.sleep(0.01)
        machine.step()  # as the last
        assert machine.exchange._head.agreed.closer == machine.exchange.machine
        for other in range(2):
            r.hear(f"ahead{other}", DEADLINE_S)
        kept = _kept(machine)
        enter = machine.exchange._entry.enter

        def entering(core):
            machine.exchange._snapshots.finish(30)
            assert _kept(machine) == kept
            assert machine.store.check([f"lowcomm/replay/chunk/{kept[0] // 4}"])
            r.say("looked")
            return enter(core)

        machine.exchange._entry.enter = entering
        machine.step()
        r.say("back")
    return end_together(r, machine, lambda m: m.exchange.stats()["machines"] == 4)


def test_a_closer_that_was_away_leaves_snapshots_and_log_alone(store):
    ends = ranks.run_ranks(_away, 4, store.port, timeout=DEADLINE_S)
    assert len(set(ends)) == 1
