"""A site whose link is cut in the middle of any op of an outer step (lab): it ends, and the others go on."""

import os
import pickle
import signal
import sys

import pytest
from linklab import Lab
from links import ENV, ROOT, expect_labs
from ranks.child import Rank
from site_phases import JOINING, OUTER_STEP, STAGES, expect_faultless, expect_survivors
from site_rank import DEADLINE_S, wake

PORT = 29400


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "stay", "ops"),
    [("fsdp2", 2, OUTER_STEP + JOINING), ("pipeline", 1, STAGES + JOINING)],
    ids=["fsdp2", "pipeline"],
)
def test_the_others_go_on_without_a_site_that_is_cut_off_in_any_op(tmp_path, store, how, stay, ops):
    expect_labs()
    tests = str(ROOT / "tests" / "python")
    environment = ENV | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "LOWCOMM_FLIGHT_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([tests, ENV["PYTHONPATH"]])
    size, here = 2 * (stay + len(ops)), Rank(-1, 0, str(tmp_path))
    with Lab(hosts=stay + 1, rate="100mbit") as lab:

        def start(host, rank):
            command = [
                sys.executable,
                os.path.join(tests, "site_on_host.py"),
                tmp_path,
                rank,
                size,
                lab.address(0),
                PORT,
                how,
                stay,
                *ops,
            ]
            return lab.start_on(host, [str(word) for word in command], env=environment)

        serve = [sys.executable, str(ROOT / "examples" / "train_diloco.py"), "--serve", str(PORT)]
        lab.start_on(0, serve, env=environment)
        staying = [start(rank // 2, rank) for rank in range(2 * stay)]
        for turn in range(len(ops)):
            here.hear(f"turn{turn}", timeout_s=DEADLINE_S)
            cut_off = [start(stay, 2 * (stay + turn) + place) for place in range(2)]
            pid = int(here.hear(f"gone{turn}-faulty", timeout_s=DEADLINE_S))
            lab.cut(stay)
            wake(pid)
            for job in cut_off:
                (ended,) = job.wait(DEADLINE_S)
                assert ended.code == -signal.SIGKILL, ended.output  # as its launcher would, once it was told
            lab.restore(stay)
        for job in staying:
            (ended,) = job.wait(DEADLINE_S)
            assert ended.code == 0, ended.output
    found = [pickle.loads((tmp_path / f"found{rank}").read_bytes()) for rank in range(2 * stay)]
    expect_faultless(expect_survivors(found, how), store.port, how, stay, mode="continue")
