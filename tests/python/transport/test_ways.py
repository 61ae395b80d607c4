"""Hosts with several network interfaces: a group takes the fastest that answers, and says so in one line."""

import sys

import pytest
from linklab import Lab, tools
from links import ENV, add_interfaces, expect_labs

RANK = """
import torch, torch.distributed as dist, torch_lowcomm as lc
dist.init_process_group("lowcomm")
def sent():
    return {n: int(open(f"/sys/class/net/{n}/statistics/tx_bytes").read()) for n in ("eth0", "other")}
before = sent()
again = dist.new_group(backend="lowcomm")
for group in (None, again):
    x = torch.ones(250_000)
    dist.all_reduce(x, group=group)
    assert torch.equal(x, torch.full((250_000,), float(dist.get_world_size())))
after = sent()
print("sent", *(f"{n}={(after[n] - before[n]) / 2e6:.3f}" for n in after))
dist.destroy_process_group()
"""


def of_ranks(lab):
    """What each rank sent by interface, in tensors, and the lines that it logged of ways. A part of the last tensor may still
    wait in the kernel when a rank looks.
    """
    job = lab.start([sys.executable, "-W", "ignore", "-c", RANK], env=ENV | {"GLOO_SOCKET_IFNAME": ""})
    ended = job.wait(120)
    assert not any(one.code for one in ended), ended
    lines = [one.output.splitlines() for one in ended]
    sent = [dict(word.split("=") for word in said[-1].split()[1:]) for said in lines]
    return [{name: float(tensors) for name, tensors in one.items()} for one in sent], [
        [line for line in said if "is reached by" in line] for said in lines
    ]


@pytest.mark.later
def test_the_fastest_interface_is_taken():
    """The second pair of interfaces is 10 times as fast; then as fast; then drops all large packets; then leads nowhere."""
    expect_labs()
    with Lab(hosts=2, rate="20mbit") as lab:
        spaces = add_interfaces(lab, "other")
        for rate, burst in (("200mbit", "16kb"), ("20mbit", "16kb"), ("200mbit", "800")):
            for space in spaces:
                limits = ("rate", rate, "burst", burst, "latency", "200ms")
                tools.tc("qdisc", "replace", "dev", "other", "root", "tbf", *limits, inside=space)
            sent, said = of_ranks(lab)
            if (rate, burst) == ("200mbit", "16kb"):
                assert all(one["other"] > 0.3 > 10 * one["eth0"] for one in sent), sent
                assert [len(lines) for lines in said] == [0, 1] and "10.99.0.1:" in said[1][0], said
            else:
                assert all(one["eth0"] > 0.3 > 10 * one["other"] for one in sent) and said == [[], []], (sent, said)
        tools.ip("link", "set", "other", "down", inside=spaces[1])
        sent, said = of_ranks(lab)
        assert all(one["eth0"] > 0.3 > 10 * one["other"] for one in sent) and said == [[], []], (sent, said)


@pytest.mark.later
def test_an_interface_that_leads_nowhere_hides_no_fast_one():
    """All pairs of four hosts find the fast way, although another one is dead, which each finds out by waiting."""
    expect_labs()
    with Lab(hosts=4, rate="20mbit") as lab:
        add_interfaces(lab, "dead", 98, joined=False)
        add_interfaces(lab, "other")
        sent, said = of_ranks(lab)
        assert all(one["other"] > 0.3 > 10 * one["eth0"] for one in sent), sent
        assert [len(lines) for lines in said] == [0, 1, 2, 3], said
