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
from site_phases import JOINING, OUTER_STEP, STAGES, expect_faultless, expect_phases, lose_sites_on_hosts
from site_rank import DEADLINE_S, wake

PORT = 29400


def _cut_off(lab, here, turn, running):
    """Cuts the last host off where a rank on it has stopped in an op, until both ranks of its site have ended."""

    def hear_pid(note):
        deadline = time.monotonic() + DEADLINE_S
        while not here.path(note).exists():
            if running.done():
                running.result()  # raises, with what the ranks have said
            assert time.monotonic() < deadline, note
            time.sleep(0.02)
        return int(here.hear(note))

    pids = [hear_pid(f"gone{turn}-faulty")]
    lab.cut(lab.hosts - 1)
    wake(pids[0])
    pids.append(hear_pid(f"gone{turn}-gone"))
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.02)
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
        namespaces = [lab.namespace(host) for host in range(lab.hosts)]
        sites = partial(lose_sites_on_hosts, folder=str(tmp_path), namespaces=namespaces)
        running = thread.submit(expect_phases, PORT, how, stay, signal.SIGSTOP, ops, sites=sites, **options)
        for turn in range(len(ops)):
            _cut_off(lab, Rank(-1, 0, str(tmp_path)), turn, running)
        end = running.result()
    expect_faultless(end, store.port, how, stay, mode="continue")
