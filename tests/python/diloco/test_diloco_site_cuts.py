"""A site whose link is cut in the middle of an outer step, or as it joins (lab): it ends, and the others go on."""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import ranks
from linklab import Lab
from links import expect_labs
from ranks import Rank
from site_phases import JOINING, STOPPED, expect_phases, lose_sites_on_hosts
from site_rank import DEADLINE_S, wake

PORT = 29400
OPTIONS = {"mode": "continue", "timeout_s": 6.0, "store_host": Lab.address(0)}


def _hear(here, note, running):
    """A note of the ranks, or what one of them has raised."""
    deadline = time.monotonic() + DEADLINE_S
    while not here.path(note).exists():
        if running.done():
            running.result()
        assert time.monotonic() < deadline, note
        time.sleep(0.02)
    return here.hear(note)


def _await_end(pids):
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.02)


def _cut_off(lab, here, turn, running):
    """Cuts the last host off where a rank on it has stopped in an op, until both ranks of its site have ended."""
    pids = [int(_hear(here, f"gone{turn}-faulty", running))]
    lab.cut(lab.hosts - 1)
    wake(pids[0])
    pids.append(int(_hear(here, f"gone{turn}-gone", running)))
    _await_end(pids)
    lab.restore(lab.hosts - 1)


@pytest.mark.slow
def test_another_goes_on_without_a_site_that_is_cut_off(tmp_path):
    expect_labs()
    ranks.zygote()  # else it ends with the thread
    faults = dict.fromkeys(("outer_step", JOINING[1]), STOPPED)
    with Lab(hosts=2, rate="100mbit") as lab, ThreadPoolExecutor(1) as thread:
        hosts = [lab.namespace(min(rank // 2, 1)) for rank in range(2 + 2 * len(faults))]
        sites = partial(lose_sites_on_hosts, folder=str(tmp_path), namespaces=hosts)
        running = thread.submit(expect_phases, PORT, "fsdp2", 1, faults, sites, **OPTIONS)
        for turn in range(len(faults)):
            _cut_off(lab, Rank(-1, 0, str(tmp_path)), turn, running)
        running.result()
