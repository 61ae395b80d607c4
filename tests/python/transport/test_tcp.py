"""The connections of groups: one port a process, settings that cannot be, and cuts that lose nothing."""

import os
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from reset_proxy import ResetProxy, rounds

import torch_lowcomm as lc
from torch_lowcomm import _C

DEADLINE_S = 90.0
SECRET = "b0pBTzHWtmPlKzjrLn7SdrZxdFKFEE9lbYgOxDY3xPI"
needs_tls = pytest.mark.skipif(not _C.tls_library(), reason="this build has no OpenSSL")


@pytest.mark.later
@pytest.mark.parametrize(("every_s", "secret"), [(0.1, ""), pytest.param(0.25, SECRET, marks=needs_tls)])
@pytest.mark.on(3, timeout=3 * DEADLINE_S)
def test_resets_lose_nothing(r, every_s, secret):
    """Rank 0 is reached through a router only, which resets connections; the sums are right all the same."""
    if secret:
        os.environ["LOWCOMM_SECRET"] = secret
    proxy = None
    if r.rank == 0:
        port = ranks.free_port()
        proxy = ResetProxy(port, every_s)
        os.environ["LOWCOMM_LISTEN"] = f"127.0.0.1:{port}"
        os.environ["LOWCOMM_ADVERTISE"] = f"127.0.0.1:{proxy.port}"
    r.init(
        "lowcomm",
        timeout_s=2 * DEADLINE_S,
        pg_options=lc.Options(policy="all_reduce=sym4", min_bytes=0),
    )
    n = 1 << 20
    mine = torch.linspace(-1, 1, n) * (r.rank + 1)
    once = mine.clone()
    dist.all_reduce(once)
    total = torch.empty(n * r.size)
    for _ in rounds(proxy, 30):
        again = mine.clone()
        dist.all_reduce(again)
        assert torch.equal(again, once), "the codes of sym4 are the same every time"
        dist.all_gather_into_tensor(total, mine)
        for rank, part in enumerate(total.split(n)):
            assert torch.equal(part, torch.linspace(-1, 1, n) * (rank + 1))
    dist.barrier()
    r.meet()  # who leaves while resets go on may leave others alone
    if proxy:
        proxy.close()
    dist.destroy_process_group()


@pytest.mark.on(2, timeout=DEADLINE_S)
def test_what_a_transport_cannot_be_is_refused(r):
    os.environ["LOWCOMM_LISTEN"] = "29600"
    with pytest.raises(ValueError, match="LOWCOMM_LISTEN: expected host:port or :port, got '29600'"):
        r.init("lowcomm", timeout_s=5)
    del os.environ["LOWCOMM_LISTEN"]
    os.environ["LOWCOMM_CONGESTION"] = "none"
    with pytest.raises(
        ValueError, match="LOWCOMM_CONGESTION: expected a congestion control that the kernel allows .* got 'none'"
    ):
        r.init("lowcomm", timeout_s=5)
    del os.environ["LOWCOMM_CONGESTION"]
    os.environ["LOWCOMM_SOCKET_IFNAME"] = "no0"
    with pytest.raises(
        ValueError,
        match="LOWCOMM_SOCKET_IFNAME or .*: expected an interface with an address, got 'no0'; this machine has .*lo",
    ):
        r.init("lowcomm", timeout_s=5)


def _listening():
    """The TCP ports that this process listens on."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if link.startswith("socket:["):
            inodes.add(link[8:-1])
    rows = [
        row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
    ]
    return {int(row[1].rsplit(":", 1)[1], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


@pytest.mark.on(2, timeout=DEADLINE_S)
def test_all_groups_share_a_port(r):
    port = ranks.free_port()
    os.environ["LOWCOMM_LISTEN"] = f"127.0.0.1:{port}"
    r.init("lowcomm", pg_options=lc.Options(policy="all_reduce=sym4", min_bytes=0))
    before = _listening()
    assert port in before
    for group in [dist.new_group() for _ in range(3)]:  # with the options of the first
        dist.all_reduce(torch.ones(1000), group=group)
    assert _listening() == before
    dist.destroy_process_group()
