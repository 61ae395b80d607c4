"""Tensors that are not contiguous: what of an output is refused, what a copy that fails ends, in which order ops see one."""

import pytest
import torch
import torch.distributed as dist
from collective_cases import bits, values
from group_check import check_group

import torch_lowcomm as lc

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "gather", "p2p")
N = 6


def _outputs(r):
    """Of each op a call with the given output, of N elements or N a rank."""
    x, big = torch.ones(N), torch.ones(N * r.size)

    def parts(out):
        return [out, *(torch.empty(N) for _ in range(r.size - 1))]

    return {
        "all_reduce": lambda out: dist.all_reduce(out),
        "all_reduce, exact": lambda out: dist.all_reduce(out),
        "broadcast": lambda out: dist.broadcast(out, 1),
        "broadcast, exact": lambda out: dist.broadcast(out, 1),
        "gather": lambda out: dist.gather(x, parts(out) if r.rank == 0 else None),
        "gather, exact": lambda out: dist.gather(x, parts(out) if r.rank == 0 else None),
        "all_gather": lambda out: dist.all_gather(parts(out), x),
        "all_gather, exact": lambda out: dist.all_gather(parts(out), x),
        "reduce_scatter": lambda out: dist.reduce_scatter_tensor(out, big),
        "reduce_scatter, exact": lambda out: dist.reduce_scatter_tensor(out, big),
        "all_to_all": lambda out: dist.all_to_all(parts(out), [x] * r.size),
        "scatter, exact": lambda out: dist.scatter(out, [x] * r.size if r.rank == 1 else None, 1),
        "reduce, exact": lambda out: dist.reduce(out, 0),
        "recv": lambda out: dist.recv(out, 1) if r.rank == 0 else dist.send(x, 0) if r.rank == 1 else None,
    }


@pytest.mark.on("pair", "quad")
def test_an_output_that_overlaps_itself_is_refused(r):
    """One rank's mistake, before it takes part: the op then goes as if nothing had been."""
    policy = "; ".join(f"{op}=minmax8:bucket=64" for op in OPS)
    r.init("lowcomm", timeout_s=20, pg_options=lc.Options(policy=policy, min_bytes=0))
    for name, op in _outputs(r).items():
        lc.set_policy("" if "exact" in name else policy)
        for expanded in (torch.empty(1).expand(N), torch.empty(2, 1).expand(2, 3)):
            out = torch.empty(N)
            if r.rank == 0:
                with pytest.raises(ValueError, match=rf"{name.split(',')[0]}: expected an output without elements"):
                    op(expanded)
            op(out.fill_(1.0))
            check_group(r)


def test_a_copy_that_fails_ends_its_op_alone(r):
    """A copy out that fails is the affair of its rank and its op alone: the exchange was complete."""
    policy = "; ".join(f"{op}=minmax8:bucket=64" for op in OPS)
    r.init("lowcomm", timeout_s=20, pg_options=lc.Options(policy=policy, min_bytes=0))
    for name, op in _outputs(r).items():
        if "exact" in name:
            continue
        with torch.inference_mode():
            closed = torch.ones(3, 2).t()  # nobody outside may write it
        if r.rank == 0:
            with pytest.raises(RuntimeError, match="[Ii]nference tensor") as failure:
                op(closed)
            assert not isinstance(failure.value, dist.DistBackendError), failure.value
        else:
            op(torch.ones(N))
        check_group(r)


def test_ops_on_one_strided_tensor_see_each_other(r):
    """Ops that are issued before the first is done see each other's results, however the tensor lies in memory."""
    policy = "; ".join(f"{op}=sym8:bucket=64" for op in OPS)
    r.init("lowcomm", pg_options=lc.Options(policy=policy, min_bytes=0))
    whole = values(torch.float32, 600 * 700, r.rank).view(600, 700)
    results = []
    for t in (whole.clone().t().contiguous(), whole.clone().t()):
        other, parts = torch.empty_like(t), torch.empty(r.size, 700, 600)
        works = [
            dist.all_reduce(t, async_op=True),
            dist.all_reduce(t, async_op=True),
            dist.broadcast(t, 1, async_op=True),
            dist.all_gather(list(parts), t, async_op=True),
            dist.all_to_all([other, *parts[1:]], [t] * r.size, async_op=True),
            dist.all_reduce(other, async_op=True),
        ]
        for work in works:
            work.wait()
        results.append([t.contiguous(), other.contiguous(), parts])
    for dense, strided in zip(*results, strict=True):
        assert torch.equal(bits(dense), bits(strided))
