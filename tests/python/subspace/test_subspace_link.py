"""lc.subspace.generate on links that delay (lab): token for token the whole decoder, in as many messages as without a delay."""

import os
import sys
from pathlib import Path

import pytest
from linklab import Lab
from links import ENV, expect_labs
from ranks.starters import TESTS

RANK = Path(__file__).with_name("generate_rank.py")
CALLS = ("greedy", "sampled", "one prompt of one token")
STAGES, NEW = 3, 12


@pytest.mark.slow
def test_three_stages_generate_on_links_that_delay(tmp_path):
    expect_labs()
    path = os.pathsep.join([str(RANK.parent), str(TESTS), ENV["PYTHONPATH"]])
    with Lab(hosts=STAGES, rate="10mbit", delay="15ms") as lab:
        environment = {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "eth0", "LOWCOMM_FLIGHT_DIR": str(tmp_path)}
        ended = lab.start([sys.executable, str(RANK)], env=ENV | environment).wait(120)
    # Coefficients with a checksum to the next stage, tokens from the last one to each other.
    sent = [2 * NEW] * (STAGES - 1) + [NEW * (STAGES - 1)]
    for rank, said in enumerate(ended):
        assert said.code == 0, said.output
        assert said.output.strip().splitlines()[-len(CALLS) :] == [
            f"{name}: equal=True sent={sent[rank]}" for name in CALLS
        ]
