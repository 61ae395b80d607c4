"""NaN and infinity in a compressed tensor: ValueError where they are, an error that names that rank on the others."""

import re

import pytest
import torch
import torch.distributed as dist
from group_check import check_group

import torch_lowcomm as lc

NEVER_S = 600.0  # longer than the harness gives the ranks: peers must not learn it by a time-out


def _not_finite(r, op, value, at, form):
    policy = "all_gather=minmax8:bucket=1024; reduce_scatter=qsgd4:bucket=512"
    r.init("lowcomm", timeout_s=NEVER_S, pg_options=lc.Options(policy=policy, min_bytes=0, chunk_bytes=65536))
    n = 200_000
    culprit = r.size - 1
    for _ in range(2):  # twice: the group goes on
        x = torch.randn(n * r.size if op == "reduce_scatter" else n)
        if r.rank == culprit:
            x[at] = value
        out = torch.empty(n * r.size if op == "all_gather" else n)

        def call(x=x, out=out):
            if form == "coalescing":  # the second of two tensors
                first = torch.ones(100)
                with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
                    dist.all_gather_into_tensor(torch.empty(100 * r.size), first)
                    dist.all_gather_into_tensor(out, x)
                return manager
            if op == "all_gather" and form == "list":
                return dist.all_gather(list(out.chunk(r.size)), x, async_op=True)
            if op == "all_gather":
                return dist.all_gather_into_tensor(out, x, async_op=True)
            if form == "list":
                return dist.reduce_scatter(out, list(x.chunk(r.size)), async_op=True)
            return dist.reduce_scatter_tensor(out, x, async_op=True)

        if r.rank == culprit:
            with pytest.raises(
                ValueError, match=rf"(?is)(nan|non-?finite|finite|inf).*{at % n}|{at % n}.*finite"
            ) as failure:
                call().wait()
            assert not isinstance(failure.value, dist.DistBackendError)
        else:
            with pytest.raises(dist.DistBackendError) as failure:
                call().wait()
            for part in (op, rf"rank {culprit}\b", "expected finite elements", "got .*at element"):
                assert re.search(part, str(failure.value)), f"no {part!r} in: {failure.value}"
        dist.barrier()
        check_group(r)
        # Exact on request, NaN and all.
        with lc.exact():
            call().wait()
        if op == "all_gather":
            assert not torch.isfinite(out[culprit * n + at]), "an exact op must carry what it is given"
        # And clean data goes through.
        x[at % x.numel()] = 0.0
        call().wait()
        assert torch.isfinite(out).all()


@pytest.mark.parametrize(
    ("op", "value", "at", "form"),
    [
        ("all_gather", float("nan"), 0, "base"),
        ("all_gather", float("inf"), 123_456, "base"),
        ("all_gather", float("-inf"), 199_999, "list"),
        ("all_gather", float("nan"), 70_000, "coalescing"),
        ("reduce_scatter", float("nan"), 0, "base"),
        ("reduce_scatter", float("nan"), 1_234, "list"),
        ("reduce_scatter", float("inf"), 199_999, "base"),
    ],
)
def test_not_finite(pair, quad, op, value, at, form):
    pair(_not_finite, op, value, at, form)
    if form == "base":
        quad(_not_finite, op, value, at, form)
