"""Which interface connections are on: LOWCOMM_SOCKET_IFNAME, or the first of gloo's GLOO_SOCKET_IFNAME."""

import pytest
import torch
import torch.distributed as dist

import torch_lowcomm as lc


def _on(names):
    return pytest.mark.on(2, env={"GLOO_SOCKET_IFNAME": names})


@pytest.mark.parametrize(
    "names", [pytest.param(names, marks=_on(names), id=str(names)) for names in ("lo", "lo,nowhere0", None)]
)
def test_names_are_devices(r, names):
    r.init("lowcomm", pg_options=lc.Options(policy="all_gather=minmax8", min_bytes=0))
    n = 1 << 20
    out, total = torch.empty(n * r.size), torch.ones(3)
    for step in range(3):
        dist.all_gather_into_tensor(out, torch.full((n,), float(r.rank + step)))
        assert torch.equal(out, torch.arange(step, step + r.size, dtype=torch.float32).repeat_interleave(n))
    dist.all_reduce(total)
    assert total.tolist() == [2.0] * 3


@_on("nowhere0")
def test_an_interface_that_there_is_not_is_named(r):
    with pytest.raises(ValueError, match="expected an interface with an address, got 'nowhere0'"):
        r.init("lowcomm")
