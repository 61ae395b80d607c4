"""Which messages a policy codes, what stats() counts of them, and which are refused."""

import pytest
import torch
import torch.distributed as dist
from p2p_cases import init, neighbours, same, stats, swap

import torch_lowcomm as lc


@pytest.mark.on("pair", "quad")
def test_coded_or_exact_by_the_policy(r):
    """Coded or exact, by what rules, and every byte of it."""
    codec = init(r, min_bytes=4096)

    def ring(x):
        before = stats() if _stats_there() else {}
        got = torch.zeros_like(x)
        swap(r, x, got)
        return got, {
            op: {k: s[k] - before.get(op, {}).get(k, 0) for k in ("calls", "exact_calls", "raw_bytes")}
            for op, s in stats().items()
        }

    def _stats_there():
        return dist.group.WORLD.group_name in lc.stats()

    x = torch.ones(1024)
    got, counts = ring(x)
    same(got, codec.roundtrip(x))
    assert counts["send"] == {"calls": 1, "exact_calls": 0, "raw_bytes": 4096}, counts
    assert counts["recv"] == {"calls": 1, "exact_calls": 0, "raw_bytes": 0}, counts
    for exact in (
        torch.ones(1023),
        torch.ones(2047).bfloat16(),
        torch.ones(5000, dtype=torch.int32),
        torch.ones(5000).double(),
    ):
        exact[1] = 3
        got, counts = ring(exact)
        same(got, exact)
        assert counts["send"]["exact_calls"] == counts["recv"]["exact_calls"] == 1, counts
    with lc.exact():
        x = torch.randn(5000, generator=torch.Generator().manual_seed(0))
        same(ring(x)[0], x)
    reasons = {"under min_bytes": 2, "dtype Int": 1, "dtype Double": 1, "inside lc.exact()": 1}
    assert stats()["send"]["exact_because"] == stats()["recv"]["exact_because"] == reasons
    assert stats()["send"]["ratio"] > 0 and stats()["recv"]["ratio"] is None


@pytest.mark.on("pair", "quad")
def test_mistakes_are_refused(r):
    """A caller's mistakes, before anything is sent; afterwards all is well."""
    codec = init(r, min_bytes=4096)
    right, left = neighbours(r)
    backend = lc.groups.backend_of()
    x = torch.ones(5000)
    for op in (backend.send, backend.recv):
        for peer in (r.rank, r.size, -1):
            with pytest.raises(ValueError, match=rf"expected a peer .* other than this one, {r.rank}, got {peer}"):
                op([x], peer, 0)
        for tag in (-1, 2**30):
            with pytest.raises(ValueError, match=rf"expected a tag of 0\.\.\.1073741823, got {tag}"):
                op([x], right, tag)
    got = torch.zeros(5000)
    works = [dist.irecv(got, left, tag=2**30 - 1), dist.isend(x, right, tag=2**30 - 1)]
    for work in works:
        work.wait()
    same(got, codec.roundtrip(x))
    assert backend.policy == "p2p=sym4:bucket=1024"
    lc.set_policy(None, "")
    x = torch.randn(5000, generator=torch.Generator().manual_seed(left))
    swap(r, torch.randn(5000, generator=torch.Generator().manual_seed(r.rank)), got)
    same(got, x)
