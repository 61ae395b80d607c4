"""A site whose link is cut in the middle of any op of an outer step (lab): it ends, and the others go on."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import ranks
from linklab import Lab
from links import expect_labs
from ranks import Rank
from site_phases import JOINING, OUTER_STEP, STAGES, come_back, expect_faultless, expect_phases, lose_sites_on_hosts
from site_rank import DEADLINE_S, expect_equal, wake

PORT = 29400


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
@pytest.mark.parametrize(
    ("how", "stay", "ops"),
    [("fsdp2", 2, OUTER_STEP + JOINING), ("pipeline", 1, STAGES + JOINING)],
    ids=["fsdp2", "pipeline"],
)
def test_the_others_go_on_without_a_site_that_is_cut_off_in_any_op(tmp_path, store, how, stay, ops):
    expect_labs()
    ranks.zygote()  # else it ends with the thread
    options = {"mode": "continue", "timeout_s": 6.0, "store_host": Lab.address(0)}
    with Lab(hosts=stay + 1, rate="100mbit") as lab, ThreadPoolExecutor(1) as thread:
        hosts = [lab.namespace(min(rank // 2, stay)) for rank in range(2 * (stay + len(ops)))]
        sites = partial(lose_sites_on_hosts, folder=str(tmp_path), namespaces=hosts)
        running = thread.submit(expect_phases, PORT, how, stay, signal.SIGSTOP, ops, sites=sites, **options)
        for turn in range(len(ops)):
            _cut_off(lab, Rank(-1, 0, str(tmp_path)), turn, running)
        end = running.result()
    expect_faultless(end, store.port, how, stay, mode="continue")


@pytest.mark.slow
def test_a_site_that_was_cut_off_comes_back_under_its_id(tmp_path):
    expect_labs()
    ranks.zygote()  # else it ends with the thread
    options = {"mode": "continue", "timeout_s": 6.0, "store_host": Lab.address(0)}
    here, gone = Rank(-1, 0, str(tmp_path)), dict.fromkeys((2, 3), -signal.SIGKILL)
    with Lab(hosts=2, rate="100mbit") as lab, ThreadPoolExecutor(1) as thread:
        hosts = [lab.namespace(min(rank // 2, 1)) for rank in range(6)]
        sites = partial(ranks.run_ranks, come_back, 6, timeout=DEADLINE_S, allow_exit=gone)
        running = thread.submit(sites, PORT, str(tmp_path), hosts, options)
        pids = [int(_hear(here, f"trained{rank}", running)) for rank in range(4)]
        lab.cut(1)
        _await_end(pids[2:])
        _hear(here, "alone", running)
        lab.restore(1)
        here.say("mended")
        ended = running.result()
    expect_equal(ended[:2] + ended[4:])
