"""The compressed path, every form of it: what every rank ends with is what `compressed_by_hand` says."""

import contextlib
import itertools
import zlib

import collective_cases as cases
import pytest
import torch
import torch.distributed as dist
from collective_cases import Case, bits
from compressed_by_hand import differs, gathered_by_hand, last_step, options, scattered_by_hand

import torch_lowcomm as lc

SPECS = ("minmax8:bucket=1024", "minmax4:bucket=64", "qsgd8:bucket=512", "qsgd2:bucket=128")
OTHERS = ("bf16", "topk:keep=0.3,values=qsgd8", "qsgd4:bucket=tensor")
SIZES = (0, 1, 63, 1024, 1025, 70_001)
GATHERS = [c for c in cases.PLAIN if c.__name__.startswith("all_gather")]
SCATTERS = [c for c in cases.REDUCING + cases.FUNCTIONAL_REDUCING if c.__name__.startswith("reduce_scatter")]
TWO_TENSORS = ("coalesced", "coalescing_manager")


def _counts(collective, n):
    return (n, n + 2) if collective.__name__.endswith(TWO_TENSORS) else (n,)


def _specs(**options):
    """Each of two ranks, and one of four."""
    pools = {spec: ("pair", "quad") if spec == SPECS[2] else ("pair",) for spec in SPECS + OTHERS}
    return [pytest.param(s, marks=pytest.mark.on(*on, timeout=120, **options)) for s, on in pools.items()]


@pytest.mark.later
@pytest.mark.parametrize("spec", _specs(alike=True))
def test_every_all_gather_gives_the_codecs_bits(r, spec):
    r.init("lowcomm", pg_options=options(f"all_gather={spec}"))
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
            parts = gathered_by_hand(codec, case, _counts(collective, n), last_step())
            if collective in (cases.all_gather, cases.all_gather_coalesced):
                want = list(itertools.chain(*zip(*parts, strict=True)))
            else:
                want = [torch.cat(p) for p in parts]
            for k, (g, w) in enumerate(zip(got, want, strict=True)):
                wrong += differs(f"{collective.__name__} {dtype} n={n} {layout} tensor {k}", g.reshape(-1), w)
                crc = zlib.crc32(bits(g).numpy().tobytes(), crc)
        if len(wrong) > 20:
            break
    assert not wrong, "\n".join(wrong[:20])
    return crc


@pytest.mark.later
@pytest.mark.parametrize("spec", _specs())
def test_every_reduce_scatter_is_the_sum_in_rank_order(r, spec):
    r.init("lowcomm", pg_options=options(f"reduce_scatter={spec}"))
    codec = lc.codec(spec)
    wrong = []
    for collective, asynchronous, average in itertools.product(SCATTERS, (False, True), (False, True)):
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        for n, dtype in [(n, torch.float32) for n in SIZES] + [(1025, torch.bfloat16), (1025, torch.float16)]:
            case = Case(dist.group.WORLD, r.rank, r.size, dtype=dtype, n=n, asynchronous=asynchronous, op=op)
            got = collective(case)
            step = last_step()
            for i, (g, count) in enumerate(zip(got, _counts(collective, n), strict=True)):
                slot = i * r.size + r.rank

                def slices(q, case=case, i=i, count=count, slot=slot, collective=collective):
                    if collective is cases.reduce_scatter:
                        return case.x(r.rank, rank=q), slot
                    whole = case.x(i, count * r.size, rank=q)
                    return whole[count * r.rank : count * (r.rank + 1)], slot

                want = scattered_by_hand(codec, case, slices, step, average=average).to(dtype)
                wrong += differs(f"{collective.__name__} {dtype} n={n} {op} tensor {i}", g.reshape(-1), want)
        if len(wrong) > 20:
            break
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.on("pair", "quad")
def test_many_in_flight(r):
    """Compressed and exact ops of both kinds in flight together, waited for in reverse."""
    spec = "qsgd8:bucket=512"
    r.init("lowcomm", pg_options=options(f"all_gather={spec}; reduce_scatter={spec}"))
    codec = lc.codec(spec)
    jobs = []
    for k in range(12):
        case = Case(dist.group.WORLD, r.rank, r.size, n=20_000 + k, seed=k)
        out = torch.empty(case.n * r.size)
        scope = lc.exact() if k % 3 == 0 else contextlib.nullcontext()
        with scope:
            work = dist.all_gather_into_tensor(out, case.x(0), async_op=True)
        jobs.append((k, case, work, out, last_step()))
    for k, case, work, out, step in reversed(jobs):
        work.wait()
        parts = [case.x(0, rank=q) for q in range(r.size)]
        if k % 3:
            parts = gathered_by_hand(codec, case, (case.n,), step)[0]
        assert torch.equal(out, torch.cat(parts)), k
