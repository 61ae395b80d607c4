"""An all_reduce is cut by the speed that ranks' links have: on hosts of the lab, by the bytes that each of them sends."""

import json
import sys

import pytest
from linklab import Lab
from links import ENV, expect_labs

RANK = """
import json, sys, torch, torch.distributed as dist, torch_lowcomm as lc
torch.use_deterministic_algorithms(sys.argv[1] == "deterministic")
dist.init_process_group("lowcomm")
sent = []
for op in range(5):
    x = torch.full((500_000,), float(dist.get_rank() + op))
    dist.all_reduce(x)
    assert torch.equal(x, torch.full((500_000,), 3.0 + 3 * op))
    sent.append(lc.stats(dist.group.WORLD).popitem()[1]["all_reduce"]["wire_bytes"])
print(json.dumps([after - before for before, after in zip([0, *sent], sent)]))
dist.destroy_process_group()
"""


@pytest.mark.later
@pytest.mark.parametrize("slices", ["by links", "deterministic"])
def test_host_at_a_fifth_of_the_rate_sends_one_tensor(slices):
    expect_labs()
    with Lab(hosts=3, rate="100mbit", rate_of={1: "20mbit"}) as lab:
        job = lab.start([sys.executable, "-W", "ignore", "-c", RANK, slices], env=ENV)
        assert [one.code for one in job.wait(200)] == [0, 0, 0], [job.output(rank) for rank in range(3)]
        tensors = [[sent / 2e6 for sent in json.loads(job.output(rank).splitlines()[-1])] for rank in range(3)]
    equal = pytest.approx(4 / 3, rel=0.01)
    assert all(sent[0] == equal for sent in tensors), tensors
    if slices == "deterministic":
        assert all(sent == [equal] * 5 for sent in tensors), tensors
    else:
        assert tensors[1][-1] == pytest.approx(1, rel=0.01), tensors
        assert all(tensors[rank][-1] == pytest.approx(1.5, rel=0.1) for rank in (0, 2)), tensors
