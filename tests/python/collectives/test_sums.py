"""Sums that lowcomm makes itself: within a stated bound of the exact sum, deterministic, the same bits on every rank."""

import itertools

import collective_cases as cases
import pytest
import torch
import torch.distributed as dist
from collective_cases import Case, bits

import torch_lowcomm as lc

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


@pytest.mark.on("pair", "quad")
def test_sums_are_close_deterministic_and_equal_on_all_ranks(r):
    """Floating sums of lowcomm alone, against sums in fp64 of data that every rank can compute."""
    r.init("lowcomm", pg_options=lc.Options(chunk_bytes=65536))
    wrong = []
    for dtype, n, op in itertools.product(cases.FLOATS, (3, 4099, 70_001)[: r.size], (SUM, AVG)):
        u = cases.UNIT[dtype]
        for collective in (
            cases.all_reduce,
            cases.reduce_scatter_tensor,
            cases.reduce_scatter,
            cases.all_reduce_coalesced,
        ):
            case = Case(dist.group.WORLD, r.rank, r.size, dtype=dtype, n=n, op=op)
            got = collective(case)[0]
            if collective is cases.reduce_scatter:
                inputs = [case.x(r.rank, rank=q) for q in range(r.size)]
            elif collective is cases.reduce_scatter_tensor:
                inputs = [case.x(0, n * r.size, rank=q)[n * r.rank : n * (r.rank + 1)] for q in range(r.size)]
            else:
                inputs = [case.x(0, rank=q) for q in range(r.size)]
            wide = torch.stack(inputs).double()
            share = r.size if op == AVG else 1
            bound = (r.size - 1 + (op == AVG)) * u * wide.abs().sum(0) / share * (2 if dtype == torch.float64 else 1.01)
            error = (got.double() - wide.sum(0) / share).abs()
            if not (error <= bound + torch.finfo(dtype).tiny).all():
                wrong.append(f"{collective.__name__} {dtype} n={n} {op}: {(error / bound).max()} of the bound")
            if collective in (cases.all_reduce, cases.all_reduce_coalesced):
                seen = [torch.empty_like(bits(got)) for _ in range(r.size)]
                dist.all_gather(seen, bits(got))
                if not all(torch.equal(s, seen[0]) for s in seen):
                    wrong.append(f"{collective.__name__} {dtype} n={n} {op}: ranks differ")
            again = collective(Case(dist.group.WORLD, r.rank, r.size, dtype=dtype, n=n, op=op))[0]
            if not torch.equal(bits(again), bits(got)):
                wrong.append(f"{collective.__name__} {dtype} n={n} {op}: not deterministic")
    assert not wrong, "\n".join(wrong)
