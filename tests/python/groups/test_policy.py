"""Policies: an allow list of ops, from the options, the environment or set_policy; exact scopes; the log."""

import contextlib

import collective_cases as cases
import pytest
import torch
import torch.distributed as dist
from compressed_by_hand import SEED, check_gathered, draw_key, last_step, options
from kept_log import kept_log

import torch_lowcomm as lc


@pytest.mark.on("pair", "quad")
def test_the_policy_is_an_allow_list(r):
    """These stay exact: small tensors, integers, bool, fp64, other reduce ops, other ops, an exact scope."""
    spec = "minmax4:bucket=64"
    policy = f"all_gather={spec}; reduce_scatter={spec}"
    r.init("lowcomm", pg_options=options(policy, min_bytes=4096))
    codec = lc.codec(spec)
    lc.reset_stats()
    check_gathered(r, torch.randn(1023), "exact")
    check_gathered(r, torch.randn(1024), "coded", codec)
    check_gathered(r, torch.randn(2047).bfloat16(), "exact")
    check_gathered(r, torch.randn(2048).bfloat16(), "coded", codec)
    for dtype in (torch.int32, torch.int64, torch.uint8, torch.bool, torch.float64):
        check_gathered(r, cases.values(dtype, 5000, r.rank), "exact")
    with lc.exact():
        check_gathered(r, torch.randn(5000), "exact")
        with lc.exact():
            check_gathered(r, torch.randn(5000), "exact")
        check_gathered(r, torch.randn(5000), "exact")
    check_gathered(r, torch.randn(5000), "coded", codec)
    with contextlib.suppress(RuntimeError), lc.exact():
        raise RuntimeError("leaves the scope")
    check_gathered(r, torch.randn(5000), "coded", codec)
    stats = lc.stats()[dist.group.WORLD.group_name]["all_gather"]
    assert stats["calls"] == 14, stats
    assert stats["exact_calls"] == 10, stats
    assert sum(stats["exact_because"].values()) == 10, stats

    x = torch.randn(5000 * r.size)
    exact = torch.empty(5000)
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        for dtype in (torch.float32, torch.int32):
            y = cases.values(dtype, 5000 * r.size, 0)  # the same on every rank
            mine = torch.empty(5000, dtype=dtype)
            dist.reduce_scatter_tensor(mine, y, op=op)
            own = y[5000 * r.rank : 5000 * (r.rank + 1)]
            want = own if op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN) else own**r.size
            torch.testing.assert_close(mine, want)
            assert op == dist.ReduceOp.PRODUCT or torch.equal(mine, want)
    # Ops that the policy does not name.
    t = x.clone()
    dist.broadcast(t, 0)
    everyone = [torch.empty_like(t) for _ in range(r.size)]
    with lc.exact():
        dist.all_gather(everyone, x)
        dist.reduce_scatter_tensor(exact, x)
    assert torch.equal(t, everyone[0])
    torch.testing.assert_close(exact, torch.stack(everyone).sum(0)[5000 * r.rank : 5000 * (r.rank + 1)])
    # The threshold counts what a rank puts in: all its slices.
    for n, coded in ((1024 // r.size - 1, False), (1024 // r.size, True)):
        before = lc.stats()[dist.group.WORLD.group_name]["reduce_scatter"]["exact_calls"]
        dist.reduce_scatter_tensor(torch.empty(n), torch.randn(n * r.size))
        after = lc.stats()[dist.group.WORLD.group_name]["reduce_scatter"]["exact_calls"]
        assert (after - before == 0) == coded, n


@pytest.mark.on("pair", timeout=60)
def test_channels_under_a_policy(r):
    """axis=channel: the last dimension of each tensor; what has none goes exact and is counted; ranks compare it."""
    spec = "sym8:axis=channel"
    r.init("lowcomm", pg_options=options(f"all_gather={spec}; reduce_scatter={spec}"))
    codec = lc.codec(spec)
    lc.reset_stats()
    for shape in ((64, 100), (3, 5, 7), (1000, 48), (10, 1)):
        check_gathered(r, torch.randn(shape), "coded", codec)
    check_gathered(r, torch.randn(2, 64, 16).bfloat16(), "coded", codec)
    for shape in ((), (1000,), (2, 65537), (0, 5)):
        check_gathered(r, torch.randn(shape), "exact")
    group = dist.group.WORLD.group_name
    because = lc.stats()[group]["all_gather"]["exact_because"]
    assert sum(because.values()) == 3, because
    assert sum(n for why, n in because.items() if why.startswith("axis=channel")) == 3, because

    x = torch.stack([torch.randn(30, 24, generator=torch.Generator().manual_seed(q)) for q in range(r.size * r.size)])
    x = x.view(r.size, r.size, 30, 24)  # [contributor][owner]
    out = torch.empty(30, 24)
    dist.reduce_scatter_tensor(out, x[r.rank].reshape(-1, 24).clone())
    total = torch.zeros(30, 24)
    for q in range(r.size):
        own = x[q, r.rank]
        sent = codec.roundtrip(own, seed=draw_key(), stream=(q << 16) + r.rank, step=last_step())
        total += own if q == r.rank else sent
    assert torch.equal(out, total)

    lc.set_policy(dist.group.WORLD, f"all_gather={spec},C=100")
    check_gathered(r, torch.randn(64, 100), "coded", codec)
    check_gathered(r, torch.randn(100, 64), "exact")

    lc.set_policy(dist.group.WORLD, f"all_gather={spec}")
    mine = torch.randn((64, 100) if r.rank == 0 else (100, 64))
    with pytest.raises(dist.DistBackendError, match="codec differs.*C=") as failure:
        dist.all_gather_into_tensor(torch.empty(6400 * r.size), mine)
    assert "C=100" in str(failure.value)
    assert "C=64" in str(failure.value)
    dist.destroy_process_group()


@pytest.mark.on("pair", "quad")
def test_set_policy(r):
    """set_policy on a living group: what was issued before keeps the old policy; other groups are left alone."""
    r.init("lowcomm", pg_options=lc.Options(min_bytes=0, seed=SEED))
    eight, four = lc.codec("minmax8"), lc.codec("minmax4:bucket=128")
    other = dist.new_group(pg_options=lc.Options(policy="all_gather=minmax4:bucket=128", min_bytes=0, seed=SEED))
    x = torch.randn(300_000)
    check_gathered(r, x, "exact")
    out = torch.empty(300_000 * r.size)
    work = dist.all_gather_into_tensor(out, x, async_op=True)
    lc.set_policy(None, "all_gather=minmax8")
    work.wait()
    mine = slice(300_000 * r.rank, 300_000 * (r.rank + 1))
    assert torch.equal(out[mine], x), "an op issued before the change is exact"
    check_gathered(r, x, "coded", eight)
    lc.set_policy(dist.group.WORLD, "all_gather=minmax4:bucket=128; reduce_scatter=qsgd8")
    check_gathered(r, x, "coded", four)
    lc.set_policy("reduce_scatter=qsgd8")
    check_gathered(r, x, "exact")
    dist.all_gather_into_tensor(out, x, group=other)
    assert torch.equal(out[mine], four.roundtrip(x))
    lc.set_policy(other, "")
    dist.all_gather_into_tensor(out, x, group=other)
    assert torch.equal(out[mine], x)
    with pytest.raises(ValueError, match="lowcomm"):
        lc.set_policy(dist.new_group(backend="gloo"), "all_gather=minmax8")
    for arguments, got in (
        (("all_gather=minmax8", dist.group.WORLD), "str, ProcessGroup"),
        ((dist.group.WORLD,), "ProcessGroup, NoneType"),
        ((None, None), "NoneType, NoneType"),
        (("a", "b"), "str, str"),
    ):
        with pytest.raises(TypeError, match=rf"expected \(policy text\) or .* got \({got}\)"):
            lc.set_policy(*arguments)
    with pytest.raises(TypeError, match="expected a process group, .* got list"):
        lc.stats([0, 1])
    with pytest.raises(ValueError, match="this rank is in"):
        lc.set_policy(dist.GroupMember.NON_GROUP_MEMBER, "")


def test_one_info_line_a_group(r):
    with kept_log() as lines:
        r.init("lowcomm", pg_options=lc.Options(policy="all_gather=minmax8:bucket=256", min_bytes=123))
        dist.new_group(pg_options=lc.Options(policy=""))
    said = [line for line in lines if "group" in line]
    assert len(said) == 2, lines
    assert "all_gather=minmax8:bucket=256" in said[0], said
    assert "123" in said[0], said
    assert "exact" in said[1], said
