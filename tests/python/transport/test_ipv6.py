"""Hosts that have IPv6 addresses alone: groups, the store on rank 0's port, and what `doctor` says of them."""

import sys

import pytest
import ranks
from linklab import Lab, tools
from links import ENV, expect_labs

RANK = """
import os, torch, torch.distributed as dist, torch_lowcomm
dist.init_process_group("lowcomm", init_method=os.environ.get("METHOD"))
x = torch.full((250_000,), dist.get_rank() + 1.0)
dist.all_reduce(x)
assert torch.equal(x, torch.full((250_000,), 3.0))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.later
def test_hosts_without_ipv4():
    expect_labs()
    with Lab(hosts=2, rate="100mbit") as lab:
        for host in (0, 1):
            space = lab.namespace(host)
            tools.ip("address", "flush", "dev", "eth0", inside=space)
            tools.ip("-6", "address", "add", f"fd77::{host + 1}/64", "dev", "eth0", "nodad", inside=space)
        env = ENV | {"MASTER_ADDR": "fd77::1"}
        for changes in ({}, {"METHOD": "lowcomm://[fd77::1]:29600"}):
            ended = lab.run([sys.executable, "-c", RANK], timeout_s=100, env=env | changes)
            assert not any(one.code for one in ended), ended
        ended = lab.run([sys.executable, "-m", "torch_lowcomm", "doctor", "--seconds", "0.8"], timeout_s=100, env=env)
        assert not any(one.code for one in ended), ended
        rows = [line.split() for line in ended[0].output.splitlines() if line[:5].strip().isdigit()]
        assert [row[:4] for row in rows] == [["0", "1", "eth0", "fd77::2"], ["1", "0", "eth0", "fd77::1"]], ended[0]
        assert all(float(rate) > 20 for row in rows for rate in row[5:]), rows


def test_torchrun_on_loopback():
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "::1", "--master-port"]
    command += [str(ranks.free_port()), "--no-python", sys.executable, "-c", RANK]
    ended = ranks.run_command([sys.executable, *command], deadline_s=90, env=ENV)
    assert ended.code == 0, ended.text
