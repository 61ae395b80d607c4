"""A far link has several connections where a lost segment would slow a single one down."""

import sys
from pathlib import Path

import pytest
from linklab import Lab
from links import ENV, expect_labs

RANK = """
import torch, torch.distributed as dist, torch_lowcomm as lc
dist.init_process_group("lowcomm", pg_options=lc.Options(policy="all_reduce=sym8"))
for _ in range(5):
    dist.all_reduce(torch.linspace(-1, 1, 1 << 21))
(connections,) = lc.connections().values()
bulk = [one for one in connections if one["lane"].startswith("bulk")]
print(f"{sum(one['sent_bytes'] > 10_000 for one in bulk)} of {len(bulk)} bulk connections", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("congestion", ["reno", ""])
def test_a_far_link_has_several_connections_where_losses_slow_one_down(congestion):
    expect_labs()
    has_bbr = "bbr" in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    bulk = 1 if has_bbr and not congestion else 16
    env = ENV | {"LOWCOMM_CONGESTION": congestion}
    with Lab(hosts=2, rate="100mbit", delay="4ms") as lab:
        for rank in lab.run([sys.executable, "-c", RANK], timeout_s=90, env=env):
            assert rank.code == 0 and f"{bulk} of {bulk} bulk connections" in rank.output, rank.output
