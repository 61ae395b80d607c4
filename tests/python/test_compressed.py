"""The compressed path: what every rank ends with is what the codec alone gives, put together by hand.

all_gather: each part is the owner's decoded value, on the owner too. reduce_scatter: fp32 sums in rank order of the others'
decoded contributions and the own one as it is; AVG divides after the sum, PREMUL_SUM multiplies before the encoding.
The n-th op of a group draws with step n, tensor i of an op in slot i (all_gather) or i*W + destination (reduce_scatter).
"""

import contextlib
import ctypes
import fcntl
import itertools
import logging
import os
import pathlib
import socket
import struct
import threading
import time
import zlib

import collective_cases as cases
import pytest
import ranks
import torch
import torch.distributed as dist
from collective_cases import Case, bits

SEED = 11
SPECS = ("minmax8:bucket=1024", "minmax4:bucket=64", "qsgd8:bucket=512", "qsgd2:bucket=128")
SIZES = (0, 1, 63, 1024, 1025, 70_001)
GATHERS = (
    cases.all_gather,
    cases.all_gather_into_tensor,
    cases.all_gather_into_tensor_in_place,
    cases.all_gather_into_tensor_stacked,
    cases.all_gather_coalesced,
    cases.all_gather_coalescing_manager,
    cases.all_gather_functional,
    cases.all_gather_functional_coalesced,
)
SCATTERS = (
    cases.reduce_scatter,
    cases.reduce_scatter_tensor,
    cases.reduce_scatter_tensor_in_place,
    cases.reduce_scatter_coalescing_manager,
    cases.reduce_scatter_functional,
    cases.reduce_scatter_functional_coalesced,
)
TWO_TENSORS = ("coalesced", "coalescing_manager")


def _options(policy, **fields):
    import torch_lowcomm as lc

    return lc.Options(**{"policy": policy, "min_bytes": 0, "seed": SEED, "chunk_bytes": 65536, **fields})


def _step():
    """The sequence number that the last op had."""
    return dist.group.WORLD._get_backend(torch.device("cpu"))._get_sequence_number_for_group()


def _counts(collective, n):
    return (n, n + 2) if collective.__name__.endswith(TWO_TENSORS) else (n,)


def gathered_by_hand(codec, case, counts, step):
    """Every rank's part of every tensor, decoded: [tensor][rank]."""
    return [
        [codec.roundtrip(case.x(i, n, rank=q), seed=SEED, stream=(q << 16) + i, step=step) for q in range(case.size)]
        for i, n in enumerate(counts)
    ]


def scattered_by_hand(codec, case, slices, step, *, average=False, factor=None):
    """This rank's sum: `slices(q)` is what rank q contributes to it, with the slot it is encoded in."""
    total = None
    for q in range(case.size):
        x, slot = slices(q)
        if factor is not None:
            x = x * factor
        if q != case.rank:
            payload = codec.encode(x, seed=SEED, stream=(q << 16) + slot, step=step)
            x = codec.decode(payload, x.numel())
        total = x.float() if total is None else total + x.float()
    return total / case.size if average else total


def _differs(label, got, want):
    if got.shape != want.shape or got.dtype != want.dtype:
        return [f"{label}: expected {want.dtype}{list(want.shape)}, got {got.dtype}{list(got.shape)}"]
    if not torch.equal(bits(got), bits(want)):
        bad = (got != want).nonzero().flatten()
        return [f"{label}: {bad.numel()} of {got.numel()} differ, first at {bad[:3].tolist()}"]
    return []


def _gathers(r, spec):
    import torch_lowcomm as lc

    r.init("lowcomm", pg_options=_options(f"all_gather={spec}"))
    codec = lc.codec(spec)
    wrong, crc = [], 0
    for collective, dtype, asynchronous in itertools.product(
        GATHERS, (torch.float32, torch.bfloat16, torch.float16), (False, True)
    ):
        sizes = SIZES if dtype == torch.float32 else (1025,)
        for n, layout in [(n, "dense") for n in sizes] + [(20, "strided")]:
            if layout != "dense" and collective is cases.all_gather_into_tensor_in_place:
                continue
            case = Case(dist.group.WORLD, r.rank, r.size, dtype=dtype, n=n, asynchronous=asynchronous, layout=layout)
            got = collective(case)
            parts = gathered_by_hand(codec, case, _counts(collective, n), _step())
            if collective in (cases.all_gather, cases.all_gather_coalesced):
                want = list(itertools.chain(*zip(*parts, strict=True)))
            else:
                want = [torch.cat(p) for p in parts]
            for k, (g, w) in enumerate(zip(got, want, strict=True)):
                wrong += _differs(f"{collective.__name__} {dtype} n={n} {layout} tensor {k}", g.reshape(-1), w)
                crc = zlib.crc32(bits(g).numpy().tobytes(), crc)
        if len(wrong) > 20:
            break
    assert not wrong, "\n".join(wrong[:20])
    return crc


@pytest.mark.parametrize("spec", SPECS)
def test_every_all_gather_gives_the_codecs_bits(pair, quad, spec):
    for pool in (pair, quad) if spec == SPECS[2] else (pair,):
        crcs = pool(_gathers, spec, timeout=120)
        assert len(set(crcs)) == 1, f"ranks differ: {crcs}"


def _scatters(r, spec):
    import torch_lowcomm as lc

    r.init("lowcomm", pg_options=_options(f"reduce_scatter={spec}"))
    codec = lc.codec(spec)
    wrong = []
    for collective, asynchronous, average in itertools.product(SCATTERS, (False, True), (False, True)):
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        for n, dtype in [(n, torch.float32) for n in SIZES] + [(1025, torch.bfloat16), (1025, torch.float16)]:
            case = Case(dist.group.WORLD, r.rank, r.size, dtype=dtype, n=n, asynchronous=asynchronous, op=op)
            got = collective(case)
            step = _step()
            for i, (g, count) in enumerate(zip(got, _counts(collective, n), strict=True)):
                slot = i * r.size + r.rank

                def slices(q, case=case, i=i, count=count, slot=slot, collective=collective):
                    if collective is cases.reduce_scatter:
                        return case.x(r.rank, rank=q), slot
                    whole = case.x(i, count * r.size, rank=q)
                    return whole[count * r.rank : count * (r.rank + 1)], slot

                want = scattered_by_hand(codec, case, slices, step, average=average).to(dtype)
                wrong += _differs(f"{collective.__name__} {dtype} n={n} {op} tensor {i}", g.reshape(-1), want)
        if len(wrong) > 20:
            break
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.parametrize("spec", SPECS)
def test_every_reduce_scatter_is_the_sum_in_rank_order(pair, quad, spec):
    pair(_scatters, spec, timeout=120)
    if spec == SPECS[2]:
        quad(_scatters, spec, timeout=120)


def _premultiplied(r, spec):
    import torch_lowcomm as lc

    r.init("lowcomm", pg_options=_options(f"reduce_scatter={spec}"))
    codec = lc.codec(spec)
    for factor, n in itertools.product((0.5, 1 / 3), (1, 1025, 70_001)):
        op = dist._make_nccl_premul_sum(factor)
        case = Case(dist.group.WORLD, r.rank, r.size, n=n, op=op)
        for collective in (cases.reduce_scatter, cases.reduce_scatter_tensor):
            got = collective(case)[0]

            def slices(q, collective=collective, case=case, n=n):
                if collective is cases.reduce_scatter:
                    return case.x(r.rank, rank=q), r.rank
                return case.x(0, n * r.size, rank=q)[n * r.rank : n * (r.rank + 1)], r.rank

            factor32 = torch.tensor(factor, dtype=torch.float32)
            want = scattered_by_hand(codec, case, slices, _step(), factor=factor32)
            assert not (wrong := _differs(f"{collective.__name__} n={n} factor {factor}", got, want)), wrong


def test_premul_sum_multiplies_before_the_encoding(pair, quad):
    pair(_premultiplied, "minmax8:bucket=1024")
    quad(_premultiplied, "qsgd8:bucket=512")


def _is_gathered(r, x, how, codec=None):
    """Gathers x; checks whether it went exact or through the codec."""
    out = torch.empty(x.numel() * r.size, dtype=x.dtype)
    dist.all_gather_into_tensor(out, x)
    mine = out[x.numel() * r.rank : x.numel() * (r.rank + 1)]
    want = x if how == "exact" else codec.roundtrip(x, seed=SEED, stream=r.rank << 16, step=_step())
    assert torch.equal(bits(mine), bits(want)), f"expected {how}: {x.dtype} of {x.numel()}"


def _allow_list(r):
    """What stays exact: small tensors, integers, bool, fp64, other reduce ops, other ops, an exact scope."""
    import torch_lowcomm as lc

    spec = "minmax4:bucket=64"
    policy = f"all_gather={spec}; reduce_scatter={spec}"
    r.init("lowcomm", pg_options=_options(policy, min_bytes=4096))
    codec = lc.codec(spec)
    lc.reset_stats()
    _is_gathered(r, torch.randn(1023), "exact")
    _is_gathered(r, torch.randn(1024), "coded", codec)
    _is_gathered(r, torch.randn(2047).bfloat16(), "exact")
    _is_gathered(r, torch.randn(2048).bfloat16(), "coded", codec)
    for dtype in (torch.int32, torch.int64, torch.uint8, torch.bool, torch.float64):
        _is_gathered(r, cases.values(dtype, 5000, r.rank), "exact")
    with lc.exact():
        _is_gathered(r, torch.randn(5000), "exact")
        with lc.exact():
            _is_gathered(r, torch.randn(5000), "exact")
        _is_gathered(r, torch.randn(5000), "exact")
    _is_gathered(r, torch.randn(5000), "coded", codec)
    with contextlib.suppress(RuntimeError), lc.exact():
        raise RuntimeError("leaves the scope")
    _is_gathered(r, torch.randn(5000), "coded", codec)
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


def _exact_is_the_threads(r):
    """A scope holds for the thread that opened it."""
    import torch_lowcomm as lc

    spec = "minmax4:bucket=64"
    r.init("lowcomm", pg_options=_options(f"all_gather={spec}"))
    seen = []

    def other():
        x = torch.randn(5000)
        out = torch.empty(5000 * r.size)
        dist.all_gather_into_tensor(out, x)
        mine = out[5000 * r.rank : 5000 * (r.rank + 1)]
        seen.append(torch.equal(mine, lc.codec(spec).roundtrip(x)))

    with lc.exact():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        _is_gathered(r, torch.randn(5000), "exact")
    assert seen == [True]


def test_the_policy_is_an_allow_list(pair, quad):
    pair(_allow_list)
    quad(_allow_list)


def test_an_exact_scope_is_the_threads_own(pair):
    pair(_exact_is_the_threads)


def _policies(r):
    """set_policy on a living group: what was issued before keeps the old policy; other groups are left alone."""
    import torch_lowcomm as lc

    r.init("lowcomm", pg_options=lc.Options(min_bytes=0, seed=SEED))
    eight, four = lc.codec("minmax8"), lc.codec("minmax4:bucket=128")
    other = dist.new_group(pg_options=lc.Options(policy="all_gather=minmax4:bucket=128", min_bytes=0, seed=SEED))
    x = torch.randn(300_000)
    _is_gathered(r, x, "exact")
    out = torch.empty(300_000 * r.size)
    work = dist.all_gather_into_tensor(out, x, async_op=True)
    lc.set_policy(None, "all_gather=minmax8")
    work.wait()
    mine = slice(300_000 * r.rank, 300_000 * (r.rank + 1))
    assert torch.equal(out[mine], x), "an op issued before the change is exact"
    _is_gathered(r, x, "coded", eight)
    lc.set_policy(dist.group.WORLD, "all_gather=minmax4:bucket=128; reduce_scatter=qsgd8")
    _is_gathered(r, x, "coded", four)
    lc.set_policy(None, "reduce_scatter=qsgd8")
    _is_gathered(r, x, "exact")
    dist.all_gather_into_tensor(out, x, group=other)
    assert torch.equal(out[mine], four.roundtrip(x))
    lc.set_policy(other, "")
    dist.all_gather_into_tensor(out, x, group=other)
    assert torch.equal(out[mine], x)
    with pytest.raises(ValueError, match="lowcomm"):
        lc.set_policy(dist.new_group(backend="gloo"), "all_gather=minmax8")


def test_set_policy(pair, quad):
    pair(_policies)
    quad(_policies)


def _from_environment(r, spec):
    import torch_lowcomm as lc

    r.init("lowcomm")
    n = 3000  # 12,000 bytes: over LOWCOMM_MIN_BYTES
    x = torch.randn(n)
    out = torch.empty(n * r.size)
    dist.all_gather_into_tensor(out, x)
    want = lc.codec(spec).roundtrip(x, seed=77, stream=r.rank << 16, step=_step())
    assert torch.equal(out[n * r.rank : n * (r.rank + 1)], want)
    dist.all_gather_into_tensor(out[: 100 * r.size], x[:100])
    assert torch.equal(out[100 * r.rank : 100 * (r.rank + 1)], x[:100]), "under LOWCOMM_MIN_BYTES"
    # What the program sets wins, field by field.
    exact = dist.new_group(pg_options=lc.Options(policy=""))
    dist.all_gather_into_tensor(out, x, group=exact)
    assert torch.equal(out[n * r.rank : n * (r.rank + 1)], x)
    eager = dist.new_group(pg_options=lc.Options(min_bytes=0))
    dist.all_gather_into_tensor(out[: 100 * r.size], x[:100], group=eager)
    assert not torch.equal(out[100 * r.rank : 100 * (r.rank + 1)], x[:100])


def test_environment_fills_unset_fields():
    spec = "qsgd4:bucket=256"
    env = {
        "LOWCOMM_POLICY": f"all_gather={spec}",
        "LOWCOMM_MIN_BYTES": 4096,
        "LOWCOMM_SEED": 77,
        "LOWCOMM_CHUNK_BYTES": 65536,
    }
    ranks.run_ranks(_from_environment, 2, spec, env=env)


def _announced(r):
    import torch_lowcomm as lc

    lines = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("torch_lowcomm")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        r.init("lowcomm", pg_options=lc.Options(policy="all_gather=minmax8:bucket=256", min_bytes=123))
        dist.new_group(pg_options=lc.Options(policy=""))
    finally:
        logger.removeHandler(handler)
    said = [line for line in lines if "group" in line]
    assert len(said) == 2, lines
    assert "all_gather=minmax8:bucket=256" in said[0], said
    assert "123" in said[0], said
    assert "exact" in said[1], said


def test_one_info_line_a_group(pair):
    pair(_announced)


def _statistics(r):
    import torch_lowcomm as lc

    spec = "minmax8:bucket=1024"
    r.init("lowcomm", pg_options=lc.Options(policy=f"all_gather={spec}; reduce_scatter={spec}", min_bytes=0))
    name = dist.group.WORLD.group_name
    n = 1 << 18
    others = r.size - 1
    for _ in range(3):
        dist.all_gather_into_tensor(torch.empty(n * r.size), torch.randn(n))
    for _ in range(2):
        dist.reduce_scatter_tensor(torch.empty(n), torch.randn(n * r.size))
    dist.all_reduce(torch.ones(10))
    stats = lc.stats()
    assert set(stats) == {name}
    assert {"all_gather", "reduce_scatter"} <= set(stats[name])
    for op, calls in (("all_gather", 3), ("reduce_scatter", 2)):
        s = stats[name][op]
        assert s["calls"] == calls, s
        assert s["exact_calls"] == 0, s
        assert s["raw_bytes"] == calls * others * n * 4, s
        payload = calls * others * lc.codec(spec).encoded_bytes(n)
        assert payload < s["wire_bytes"] < 1.01 * payload, (payload, s)
        assert s["ratio"] == pytest.approx(s["raw_bytes"] / s["wire_bytes"])
        assert 3.9 < s["ratio"] < 4, s
        assert s["encode_s"] > 0, s
        assert s["wait_s"] > 0, s
        assert s["decode_s"] > 0, s
    lc.reset_stats()
    with lc.exact():
        dist.reduce_scatter_tensor(torch.empty(n), torch.randn(n * r.size))
        dist.all_gather_into_tensor(torch.empty(n * r.size), torch.randn(n))
    stats = lc.stats(dist.group.WORLD)[name]
    for op in ("all_gather", "reduce_scatter"):
        s = stats[op]
        assert (s["calls"], s["exact_calls"]) == (1, 1), s
        assert 4 * n * others <= s["wire_bytes"] < 1.01 * 4 * n * others, f"{op} moves (W-1)/W of the whole: {s}"
        assert s["encode_s"] + s["decode_s"] + s["wait_s"] > 0, s
    # Another group counts by itself, and leaves with it.
    other = dist.new_group()
    dist.all_gather_into_tensor(torch.empty(3 * r.size), torch.ones(3), group=other)
    assert lc.stats()[other.group_name]["all_gather"]["calls"] == 1
    dist.destroy_process_group(other)
    assert name in lc.stats()


def test_statistics(pair, quad):
    pair(_statistics)
    quad(_statistics)


def _own_loopback(r):
    """A network namespace for these ranks alone, where the system allows one: nobody else's traffic is counted."""
    libc = ctypes.CDLL(None, use_errno=True)
    clone_newnet, siocsifflags, iff_up = 0x40000000, 0x8914, 1
    if r.rank == 0:
        alone = libc.unshare(clone_newnet) == 0
        if alone:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
                fcntl.ioctl(s, siocsifflags, struct.pack("16sH22x", b"lo", iff_up))
        r.say("namespace", os.getpid() if alone else "")
        r.hear("joined")
        return alone
    pid = r.hear("namespace")
    if pid:
        with open(f"/proc/{pid}/ns/net") as namespace:
            assert libc.setns(namespace.fileno(), clone_newnet) == 0, os.strerror(ctypes.get_errno())
    r.say("joined")
    return bool(pid)


def _sent_on_loopback():
    lines = pathlib.Path("/proc/self/net/dev").read_text().splitlines()  # this namespace's, unlike /sys
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:"))


def _on_the_wire(r, op, policy):
    """(interface bytes, counted bytes of both ranks) of one stretch, what loopback does by itself subtracted."""
    import torch_lowcomm as lc

    alone = _own_loopback(r)
    r.init("lowcomm", pg_options=lc.Options(policy=policy, min_bytes=0))
    n = 1 << 20  # 1 MiB of codes at 8 bits
    whole = torch.randn(n * r.size)
    out = torch.empty(n * r.size)
    results = []
    for _ in range(3 if alone else 12):
        dist.barrier()
        start = _sent_on_loopback()
        time.sleep(0.1)
        idle = _sent_on_loopback() - start
        dist.barrier()
        lc.reset_stats()
        start, begun = _sent_on_loopback(), time.monotonic()
        for _ in range(8):
            if op == "all_gather":
                dist.all_gather_into_tensor(out, whole[:n])
            else:
                dist.reduce_scatter_tensor(out[:n], whole)
        r.say(f"done{len(results)}.{r.rank}")
        for q in range(r.size):
            r.hear(f"done{len(results)}.{q}")
        sent = _sent_on_loopback() - start - idle * (time.monotonic() - begun) / 0.1
        counted = torch.tensor([lc.stats()[dist.group.WORLD.group_name][op]["wire_bytes"]])
        dist.all_reduce(counted)
        results.append((sent, counted.item()))
    return alone, [sent / counted - 1 for sent, counted in results]


@pytest.mark.parametrize("policy", ["", "all_gather=minmax8; reduce_scatter=qsgd8"], ids=["exact", "compressed"])
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_wire_bytes_are_the_interfaces(op, policy):
    alone, excess = ranks.run_ranks(_on_the_wire, 2, op, policy, timeout=90)[0]
    # On a shared loopback others' traffic blurs most stretches: a quiet one must show it.
    within = [-0.0005 < e < 0.01 for e in excess]
    assert all(within) if alone else any(within), f"interface over counter - 1: {excess}"


def _in_flight(r):
    """Compressed and exact ops of both kinds in flight together, waited for in reverse."""
    import torch_lowcomm as lc

    spec = "qsgd8:bucket=512"
    r.init("lowcomm", pg_options=_options(f"all_gather={spec}; reduce_scatter={spec}"))
    codec = lc.codec(spec)
    jobs = []
    for k in range(12):
        case = Case(dist.group.WORLD, r.rank, r.size, n=20_000 + k, seed=k)
        out = torch.empty(case.n * r.size)
        scope = lc.exact() if k % 3 == 0 else contextlib.nullcontext()
        with scope:
            work = dist.all_gather_into_tensor(out, case.x(0), async_op=True)
        jobs.append((k, case, work, out, _step()))
    for k, case, work, out, step in reversed(jobs):
        work.wait()
        parts = [case.x(0, rank=q) for q in range(r.size)]
        if k % 3:
            parts = gathered_by_hand(codec, case, (case.n,), step)[0]
        assert torch.equal(out, torch.cat(parts)), k


def test_many_in_flight(pair, quad):
    pair(_in_flight)
    quad(_in_flight)


def _detail(r):
    import torch_lowcomm as lc

    spec = "minmax8:bucket=256"
    r.init("lowcomm", pg_options=_options(f"all_gather={spec}"))
    _is_gathered(r, torch.randn(5000), "coded", lc.codec(spec))
    lc.set_policy(None, "")
    _is_gathered(r, torch.randn(5000), "exact")
    assert dist.group.WORLD.group_name in lc.stats()


def test_under_debug_detail():
    ranks.run_ranks(_detail, 2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
