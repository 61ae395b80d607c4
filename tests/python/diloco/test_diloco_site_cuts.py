"""A site whose link is cut in the middle of any op of an outer step (lab): it ends, and the two others go on."""

import os
import pickle
import signal
import sys

import pytest
from linklab import Lab
from links import ENV, ROOT, expect_labs
from ranks.child import Rank
from site_phases import OUTER_STEP, expect_survivors
from site_rank import DEADLINE_S, wake

PORT = 29400


@pytest.mark.slow
def test_two_sites_go_on_without_a_third_that_is_cut_off_in_any_op(tmp_path):
    expect_labs()
    tests = str(ROOT / "tests" / "python")
    environment = ENV | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "LOWCOMM_FLIGHT_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([tests, ENV["PYTHONPATH"]])
    size, here = 4 + 2 * len(OUTER_STEP), Rank(-1, 0, str(tmp_path))
    with Lab(hosts=3, rate="100mbit") as lab:

        def start(host, rank):
            command = [
                sys.executable,
                os.path.join(tests, "site_on_host.py"),
                tmp_path,
                rank,
                size,
                lab.address(0),
                PORT,
            ]
            return lab.start_on(host, [str(word) for word in command] + list(OUTER_STEP), env=environment)

        serve = [sys.executable, str(ROOT / "examples" / "train_diloco.py"), "--serve", str(PORT)]
        lab.start_on(0, serve, env=environment)
        stay = [start(rank // 2, rank) for rank in range(4)]
        for turn in range(len(OUTER_STEP)):
            here.hear(f"turn{turn}", timeout_s=DEADLINE_S)
            cut_off = [start(2, 4 + 2 * turn + place) for place in range(2)]
            pid = int(here.hear(f"gone{turn}-faulty", timeout_s=DEADLINE_S))
            lab.cut(2)
            wake(pid)
            for job in cut_off:
                (ended,) = job.wait(DEADLINE_S)
                assert ended.code == -signal.SIGKILL, ended.output  # as its launcher would, once it was told
            lab.restore(2)
        for job in stay:
            (ended,) = job.wait(DEADLINE_S)
            assert ended.code == 0, ended.output
    expect_survivors([pickle.loads((tmp_path / f"found{rank}").read_bytes()) for rank in range(4)])
