"""NaN and infinity in a compressed tensor: ValueError where they are, an error that names that rank on the others."""

import re

import pytest
import torch
import torch.distributed as dist
from group_check import check_group, exception_of

import torch_lowcomm as lc

POLICY = "all_gather=minmax8:bucket=1024; reduce_scatter=qsgd4:bucket=512"


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
# The time-out is longer than the harness gives the ranks: peers must not learn it by that.
@pytest.mark.on(
    "pair", "quad", group={"timeout_s": 600.0, "pg_options": lc.Options(POLICY, min_bytes=0, chunk_bytes=65536)}
)
def test_not_finite(r, op, value, at, form):
    """The op's Work says so by every way of asking, on the rank at fault and on the others."""
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

        kind = ValueError if r.rank == culprit else dist.DistBackendError
        work = call()
        with pytest.raises(kind) as failure:
            work.wait()
        message = str(failure.value)
        if r.rank == culprit:
            assert re.search(rf"(?is)(nan|non-?finite|finite|inf).*{at % n}|{at % n}.*finite", message), message
            assert not isinstance(failure.value, dist.DistBackendError)
        else:
            for part in (op, rf"rank {culprit}\b", "expected finite elements", "got .*at element"):
                assert re.search(part, message), f"no {part!r} in: {message}"
        if form != "coalescing":
            assert work.is_completed() and not work.is_success() and exception_of(work) is not None
            with pytest.raises(kind, match="finite"):
                work.wait()  # again
            with pytest.raises((ValueError, RuntimeError), match="finite"):
                work.get_future().wait()
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
