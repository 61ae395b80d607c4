"""A link that is cut under a pipeline (lab): both stages name the message that they waited for, and go on once it is mended."""

import os
import re
import sys
import time
from pathlib import Path

import pytest
import stages_case as case
from linklab import Lab
from links import ENV, expect_labs
from ranks.starters import TESTS

RANK = Path(__file__).with_name("link_rank.py")


@pytest.mark.slow
def test_a_cut_link_is_named_on_both_sides_and_a_new_group_goes_on(tmp_path):
    expect_labs()
    path = os.pathsep.join([str(TESTS), ENV["PYTHONPATH"]])
    with Lab(hosts=2, rate="100mbit") as lab:
        environment = {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "eth0", "LOWCOMM_FLIGHT_DIR": str(tmp_path)}
        job = lab.start([sys.executable, str(RANK), str(tmp_path)], env=ENV | environment)

        def until(text):
            end = time.monotonic() + 60
            while not all(text in job.output(rank) for rank in (0, 1)):
                assert time.monotonic() < end and job.running() == [0, 1], job.output(0) + job.output(1)
                time.sleep(0.05)

        until("step 10")
        lab.cut(1)
        until("boundary 0")
        lab.restore(1)
        (tmp_path / "mended").touch()
        ended = job.wait(60)
    for rank, said in enumerate(ended):
        assert said.code == 0, said.output
        *_, failed, after = said.output.strip().splitlines()
        assert re.search(
            rf"rank {rank}: .*boundary 0, micro-batch \d, tensor 0.*([Tt]imed out|gave the group up)", failed
        ), failed
        assert re.fullmatch(rf"equal=True slots={case.ROWS} forgotten=(\{{\}}|\{{'differs': \d+\}})", after), after
