"""Which ranks share a host, as DDP's hook, FSDP2 and QuantizedAdam find it: on hosts of the lab, and where hosts differ."""

import json
import sys

import pytest
import torch
from kept_log import kept_log
from linklab import Lab
from links import ENV, expect_labs

from torch_lowcomm._hosts import hosts_of
from torch_lowcomm.diloco.unnamed_replicas import warn_of_one_host

FOUND = """
import json, torch, torch.distributed as dist, torch_lowcomm as lc
import torch.distributed.fsdp
dist.init_process_group("lowcomm")
net = torch.nn.Linear(64, 64)
state = lc.ddp.State(model=net)
adam = lc.QuantizedAdam(net.parameters())
way = state._connected.way
sharded = torch.distributed.fsdp.fully_shard(torch.nn.Linear(64, 64))
over_hosts = lc.fsdp.quantize(sharded).hosts is not None
print(json.dumps([way.rows, adam._shares is not None, over_hosts]))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("sizes", "rows"), [((2, 2), [[0, 1], [2, 3]]), ((1, 1), "flat")])
def test_hosts_are_found_by_their_network_namespaces(sizes, rows):
    """Two hosts of the lab: what ranks of one host find without a word of the program."""
    expect_labs()
    with Lab(hosts=2, rate="unshaped") as lab:
        jobs = []
        for rank in range(sum(sizes)):
            host = rank // sizes[0]
            named = {
                **lab.environment(host),
                "RANK": str(rank),
                "WORLD_SIZE": str(sum(sizes)),
                "LOCAL_RANK": str(rank % sizes[0]),
            }
            jobs.append(lab.start_on(host, [sys.executable, "-W", "ignore", "-c", FOUND], env={**ENV, **named}))
        for job in jobs:
            assert [one.code for one in job.wait(120)] == [0], job.output(0)
            found = json.loads(job.output(0).splitlines()[-1])
            assert found == [rows, rows != "flat", rows != "flat"]


class Found:
    """A group's backend, as far as hosts go."""

    def __init__(self, hosts):
        self.hosts = hosts
        self.options = type("Options", (), {"global_ranks_in_group": [10 + rank for rank in range(len(hosts))]})()


@pytest.mark.parametrize(
    ("numbers", "table", "said"),
    [
        ([0, 1, 0, 1], [[10, 12], [11, 13]], None),
        ([0, 0, 0, 0], None, None),
        ([0, 1, 2], None, None),
        ([0, 0, 1], None, r"hosts have [2, 1] ranks: each rank sends a copy of its own, up to 2 over one host's link"),
    ],
)
def test_hosts_with_as_many_ranks_send_one_copy_each(numbers, table, said):
    with kept_log() as log:
        found = [hosts_of(f"case {numbers}", Found(numbers), "auto") for _ in range(2)]
    expected = None if table is None else torch.tensor(table)
    assert all(rows is expected is None or torch.equal(rows, expected) for rows in found)
    assert [said in text for text in log] == ([True] if said else [])
    assert hosts_of("case", Found(numbers), "flat") is None


def test_sites_of_one_host_are_warned_of():
    with kept_log() as log:
        for hosts in ([[0, 1], [2, 3]], [[0, 1]], [[0], [1]]):
            warn_of_one_host(hosts)
    assert len(log) == 1 and "ranks [0, 1] are on one host" in log[0], log
