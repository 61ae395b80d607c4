"""Groups whose frames ride on lowcomm's own connections: the bits of gloo's, one port, and cuts that lose nothing."""

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
POLICY = (
    "all_reduce=sym4; all_gather=minmax8; reduce_scatter=qsgd8; all_to_all=sym4; broadcast=sym8; gather=sym4; p2p=sym4"
)


def _results(r, n=70_001):
    """Every op's result, of seeded tensors."""
    torch.manual_seed(r.rank)
    mine = torch.randn(n * r.size)
    found = {"all_reduce": mine.clone(), "broadcast": mine.clone(), "all_to_all": torch.empty(n * r.size)}
    dist.all_reduce(found["all_reduce"])
    dist.broadcast(found["broadcast"], 1)
    dist.all_to_all_single(found["all_to_all"], mine)
    found["all_gather"] = torch.empty(n * r.size * r.size)
    dist.all_gather_into_tensor(found["all_gather"], mine)
    found["reduce_scatter"] = torch.empty(n)
    dist.reduce_scatter_tensor(found["reduce_scatter"], mine)
    gathered = [torch.empty(n * r.size) for _ in range(r.size)] if r.rank == 0 else None
    dist.gather(mine, gathered)
    found["gather"] = torch.cat(gathered) if gathered else torch.empty(0)
    found["message"] = torch.empty(n * r.size)
    to, of = (r.rank + 1) % r.size, (r.rank - 1) % r.size
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, to), dist.P2POp(dist.irecv, found["message"], of)]
    ):
        work.wait()
    with torch.no_grad():
        found["half"] = mine.to(torch.bfloat16)
    dist.all_reduce(found["half"])
    return found


def _equal(r, policy, connections):
    found = []
    for transport in ("gloo", "tcp"):
        options = lc.Options(policy=policy, min_bytes=0, transport=transport, connections=connections)
        r.init("lowcomm", pg_options=options)
        found.append(_results(r))
        dist.destroy_process_group()
    for op, tensor in found[0].items():
        if not policy and r.size > 2 and op in ("all_reduce", "half"):  # gloo sums in another order
            torch.testing.assert_close(tensor, found[1][op], rtol=0.02, atol=0.05)
            continue
        assert torch.equal(tensor, found[1][op]), op


@pytest.mark.parametrize("policy", ["", POLICY])
def test_two_ranks_have_the_bits_of_gloo(pair, policy):
    pair(_equal, policy, 1)


@pytest.mark.parametrize(("policy", "connections"), [("", 1), (POLICY, 3)])
def test_four_ranks_have_the_bits_of_gloo(quad, policy, connections):
    quad(_equal, policy, connections)


def _behind_a_router(r, every_s, secret):
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
        pg_options=lc.Options(policy="all_reduce=sym4", min_bytes=0, transport="tcp"),
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


@pytest.mark.later
@pytest.mark.parametrize(("every_s", "secret"), [(0.1, ""), (0.25, SECRET)])
def test_resets_lose_nothing(every_s, secret):
    if secret and not _C.tls_library():
        pytest.skip("this build has no OpenSSL")
    ranks.run_ranks(_behind_a_router, 3, every_s, secret, timeout=3 * DEADLINE_S)


def _refused(r):
    with pytest.raises(ValueError, match="transport: expected gloo or tcp, got 'udp'"):
        lc.Options(transport="udp")
    os.environ["LOWCOMM_TRANSPORT"] = "udp"
    with pytest.raises((ValueError, dist.DistBackendError), match="LOWCOMM_TRANSPORT: expected gloo or tcp, got 'udp'"):
        r.init("lowcomm")
    os.environ["LOWCOMM_TRANSPORT"] = "tcp" if r.rank else "gloo"
    with pytest.raises(dist.DistBackendError, match="transport differs: rank . has '(gloo|tcp)', rank . has"):
        r.init("lowcomm")
    os.environ["LOWCOMM_TRANSPORT"] = "tcp"
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
    with pytest.raises(ValueError, match="LOWCOMM_SOCKET_IFNAME: expected an interface with an address, got 'no0'"):
        r.init("lowcomm", timeout_s=5)


def test_what_a_transport_cannot_be_is_refused():
    ranks.run_ranks(_refused, 2, timeout=DEADLINE_S)


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


def _one_port(r):
    port = ranks.free_port()
    os.environ["LOWCOMM_LISTEN"] = f"127.0.0.1:{port}"
    r.init("lowcomm", pg_options=lc.Options(policy="all_reduce=sym4", min_bytes=0, transport="tcp"))
    before = _listening()
    assert port in before
    more = [dist.new_group() for _ in range(3)]  # with the options of the first
    for group in more:
        dist.all_reduce(torch.ones(1000), group=group)
    gloos = _listening() - before
    assert len(gloos) <= len(more), "one for gloo, of every group"
    dist.destroy_process_group()


def test_all_groups_share_a_port():
    ranks.run_ranks(_one_port, 2, timeout=DEADLINE_S)
