"""A link that is cut under a pipeline (lab): both stages end at the deadline, with the message that they waited for."""

import os
import re
import sys
import time
from pathlib import Path

import pytest
from linklab import Lab
from links import ENV, expect_labs

RANK = Path(__file__).with_name("link_rank.py")


@pytest.mark.slow
def test_a_cut_link_is_named_on_both_sides(tmp_path):
    expect_labs()
    path = os.pathsep.join([str(RANK.parent), ENV["PYTHONPATH"]])
    with Lab(hosts=2, rate="100mbit") as lab:
        environment = {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "eth0", "LOWCOMM_FLIGHT_DIR": str(tmp_path)}
        job = lab.start([sys.executable, str(RANK)], env=ENV | environment)
        end = time.monotonic() + 60
        while "step 10" not in job.output(0):
            assert time.monotonic() < end and job.running() == [0, 1], job.output(0) + job.output(1)
            time.sleep(0.05)
        lab.cut(1)
        ended = job.wait(60)
    for rank, said in enumerate(ended):
        assert said.code == 3, said.output
        last = said.output.strip().splitlines()[-1]
        assert re.search(
            rf"rank {rank}: .*boundary 0, micro-batch \d, tensor 0.*([Tt]imed out|gave the group up)", last
        ), last
