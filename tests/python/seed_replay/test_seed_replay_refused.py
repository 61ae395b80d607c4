"""Seed replay with machines that do not fit, lie or lose the store: each is named, and the others go on."""

import re

import pytest
import ranks
from seed_replay_core import Machine, end_together, machines_by_iteration

DEADLINE_S = 120
AT = 12  # the iteration in which it happens


def _spoilt(machine, how):
    """This machine's message of iteration AT, or nearly."""
    if how in ("iteration", "length"):
        other = machine.another_core({"codec": "fp16"} if how == "length" else {})
        other.iteration = AT + (3 if how == "iteration" else 0)
        return other.message(machine.exchange.machine, [0.5] * machine.samples)
    message = machine.message()
    return message[:9] if how == "short" else message[:-1] + bytes([message[-1] ^ 1])


SAYS = {
    "iteration": f"got one of machine [0-9]+ and iteration {AT + 3}",
    "length": "expected [0-9]+ bytes.*, got [0-9]+",
    "short": "expected 22 bytes or more, got 9",
    "checksum": "expected the CRC-32C",
}


def _liar(r, port, how):
    machine = Machine(port, f"machine{r.rank}", min_machines=3).join()
    if r.rank == 2:
        exchange = machine.exchange
        put = exchange._store.set

        def putting(key, value):
            if key.startswith("m") and machine.core.iteration == AT:
                put(key, value[:8] + _spoilt(machine, how))
                exchange._head.wait(AT, DEADLINE_S)  # or it would write the set itself, with what it did not send
            else:
                put(key, value)

        exchange._store.set = putting
    ended = end_together(r, machine, lambda m: m.core.iteration > AT + 1 and m.exchange.stats()["machines"] == 3)
    return *ended, machine.core.log, machine.exchange.stats()["void"]


@pytest.mark.later
@pytest.mark.parametrize("how", SAYS)
def test_a_spoilt_message_is_named_and_void(store, how):
    said = []
    ends = ranks.run_ranks(_liar, 3, store.port, how, timeout=DEADLINE_S, outputs=said)
    ranks.expect_alike([end[:3] for end in ends])
    assert len(machines_by_iteration(ends[0][2])[AT]) == 2
    assert [end[3] for end in ends[:2]] == [0, 0] and ends[2][3] >= 1
    assert re.search(f"iteration {AT}: dropped machine 'machine2': .*{SAYS[how]}", "".join(said[:2])), said


DIFFERENT = {
    "model": ({"width": 13}, r"SeedReplay: expected what the other .*got .*13"),
    "options": ({"options": {"lr_scale": "mean"}}, r"SeedReplay: expected what the other .*sqrt.*got .*mean"),
    "check_every": (
        {"options": {"agreed": "check_every=5"}},
        r"SeedReplay: expected what the other .*got .*check_every=5",
    ),
    "weights": ({"weights": 1}, r"expected the weights that the run has at iteration 0.*got 0x"),
    "version": ({}, r"expected what the other .*'store_protocol=2 .*got 'store_protocol=3 "),
}


@pytest.mark.later
@pytest.mark.parametrize("what", DIFFERENT)
@pytest.mark.on(2, timeout=DEADLINE_S)
def test_refuses_a_machine_with_another(r, port, what):
    from torch_lowcomm.seed_replay.store import exchange as store_exchange

    if r.rank == 1:
        r.hear("begun", DEADLINE_S)
        given, says = DIFFERENT[what]
        if what == "version":
            store_exchange._VERSION = 3
        with pytest.raises(ValueError, match=says):
            Machine(port, "another", min_machines=1, **given).join()
        r.say("refused")
        return
    machine = Machine(port, "first", min_machines=1).join()
    r.say("begun")
    while not r.path("refused").exists():
        machine.step()
    machine.until(machine.core.iteration + 5)
    assert machine.exchange.stats()["machines"] == 1
    machine.exchange.leave()
