"""Links between hosts under connections of our own: a silent one is a pause within the deadline, else an error; a far one
has several connections where a lost segment would slow a single one down.
"""

import sys
import time
from pathlib import Path

import pytest
from linklab import Lab
from links import ENV, expect_labs

RANK = str(Path(__file__).with_name("tcp_link_rank.py"))
DEADLINE_S = 90


def _run(steps, deadline_s, cut_s):
    """The output and the code of both ranks; the link of the second is silent for `cut_s` once they are under way."""
    expect_labs()
    with Lab(hosts=2, rate="20mbit") as lab:
        job = lab.start([sys.executable, RANK, str(steps), str(deadline_s)], env=ENV | {"GLOO_SOCKET_IFNAME": "eth0"})
        end = time.monotonic() + DEADLINE_S
        while "step 10" not in job.output(0):
            assert time.monotonic() < end and job.running(), job.output(0)
            time.sleep(0.05)
        lab.cut(1)
        time.sleep(cut_s)
        lab.restore(1)
        return job.wait(DEADLINE_S)


@pytest.mark.slow
@pytest.mark.parametrize("congestion", ["reno", ""])
def test_a_far_link_has_several_connections_where_losses_slow_one_down(congestion):
    expect_labs()
    has_bbr = "bbr" in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    bulk = 1 if has_bbr and not congestion else 16
    env = ENV | {"GLOO_SOCKET_IFNAME": "eth0", "LOWCOMM_CONGESTION": congestion}
    with Lab(hosts=2, rate="100mbit", delay="4ms") as lab:
        job = lab.start([sys.executable, RANK, "4", "30", str(1 << 21)], env=env)
        for rank in job.wait(DEADLINE_S):
            assert rank.code == 0 and f"all, over {bulk} of {bulk} bulk connections" in rank.output, rank.output


@pytest.mark.slow
def test_a_silent_link_is_a_pause():
    for rank in _run(steps=60, deadline_s=30, cut_s=4):
        assert rank.code == 0 and "all" in rank.output, rank.output


@pytest.mark.slow
def test_a_link_that_is_silent_past_the_deadline_is_a_named_error():
    for number, rank in enumerate(_run(steps=100_000, deadline_s=3, cut_s=6)):
        assert rank.code == 3, rank.output
        assert f"between rank {number}" in rank.output and "all_reduce failed" in rank.output, rank.output
