"""Seed replay at a store, in real processes over a real TCPStore: the plain run, late machines, and what the log holds."""

import collections
import re

import pytest
import ranks
import torch.distributed as dist
from replay_core import Machine, end_together

DEADLINE_S = 90


@pytest.fixture
def store():
    """The store that outlives all machines."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _run(r, port, iterations, options):
    machine = Machine(port, f"machine{r.rank}", least=r.size, **options).join()
    before = machine.validation()
    machine.until(iterations)
    ended = machine.core.checksum(), machine.exchange.stats(), machine.core.log, machine.validation() / before
    machine.exchange.leave()
    return ended


def test_machines_end_alike(store):
    iterations, size, samples = 40, 3, 2
    ends = ranks.run_ranks(_run, size, store.port, iterations, {"samples": samples}, timeout=DEADLINE_S)
    assert len({(checksum, log) for checksum, _, log, _ in ends}) == 1
    for _, stats, _, fell in ends:
        assert stats["machines"] == size
        assert stats["void"] == stats["dropped"] == 0
        assert stats["sent_bytes"] > 0 < stats["received_bytes"]
        assert fell < 0.9


def _late(r, port, chunk):
    """Two machines come at once when two are at it, with the first weights: they download bytes, and no weights."""
    if r.rank >= 2:
        r.hear("begun")
    machine = Machine(port, f"machine{r.rank}", chunk=chunk).join()
    if r.rank >= 2:
        assert machine.core.iteration >= 30
    else:
        machine.until(30)
        if r.rank == 0:
            r.say("begun")
    ended = end_together(r, machine, lambda m: m.exchange.stats()["machines"] == 4)
    return ended, machine.exchange.stats(), machine.core.log


@pytest.mark.parametrize("chunk", [8, 256])
def test_lets_two_late_machines_in_at_once(store, chunk):
    ends = ranks.run_ranks(_late, 4, store.port, chunk, timeout=DEADLINE_S)
    assert len({(ended, log) for ended, _, log in ends}) == 1
    assert all(stats["void"] == stats["dropped"] == 0 for _, stats, _ in ends)


def _keys(store):
    """By what comes before the first number, with how many there are of each."""
    names = (key.strip("/").removeprefix("lowcomm/replay/") for key in store.list_keys())
    return collections.Counter(re.sub(r"[0-9].*|(?<=beat/).*", "", name).rstrip("/") for name in names)


def _watched(r, port):
    machine = Machine(port, f"machine{r.rank}", chunk=4).join()
    counts = []
    for iteration in (20, 60, 100):
        machine.until(iteration)
        counts.append(_keys(machine.store))
    r.say(f"ended{r.rank}")
    for other in range(r.size):
        r.hear(f"ended{other}")
    machine.exchange.leave()
    return counts, machine.core.log


def test_keys_stay_few(store):
    """But for the chunks, of which there is one for every so many iterations: they are the log."""
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
        "mail",
        "name",
        "ask",
        "asks",
    }
    for counts, _ in ends:
        for count in counts:
            assert set(count) <= known
            assert count["log"] <= 4 * 3 + 1
        grown = counts[2] - counts[0]
        assert set(grown) <= {"chunk", "log"}
        assert grown["chunk"] == 2 * 20
    chunks = [store.get(f"lowcomm/replay/chunk/{number}/0") for number in range(24)]
    assert ends[0][1].startswith(b"".join(chunks))
