"""Every op with tensors of every dtype ends within the test's deadline, by a result or an error, alike where ranks do the same.

Over gloo, over lowcomm's own connections, and where a policy names all ops: a dtype that the inner backend refuses must not
leave a rank that waits for ever.
"""

from datetime import timedelta

import collective_cases as cases
import pytest
import torch
import torch.distributed as dist

import torch_lowcomm as lc

FURTHER = (torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64)
DTYPES = cases.FLOATS + cases.INTEGERS + cases.OTHERS + FURTHER
CODEC = "sym8:bucket=64"
NAMED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "gather", "p2p")
OPTIONS = {
    "exact": {},
    "policy": {"policy": "; ".join(f"{op}={CODEC}" for op in NAMED), "min_bytes": 0},
}
N = 6
NEVER = timedelta(hours=1)  # for a group: an op that hangs is to meet the test's deadline, and not to end by an error


def _lists(x, group):
    return [torch.zeros_like(x) for _ in range(dist.get_world_size(group))]


def _half(x):
    return x[: x.numel() // 2].clone()


OPS = {
    "all_reduce": lambda x, g, r: dist.all_reduce(x, group=g),
    "all_reduce max": lambda x, g, r: dist.all_reduce(x, dist.ReduceOp.MAX, group=g),
    "all_reduce avg": lambda x, g, r: dist.all_reduce(x, dist.ReduceOp.AVG, group=g),
    "reduce": lambda x, g, r: dist.reduce(x, 0, group=g),
    "broadcast": lambda x, g, r: dist.broadcast(x, 0, group=g),
    "all_gather": lambda x, g, r: dist.all_gather(_lists(x, g), x, group=g),
    "all_gather_into_tensor": lambda x, g, r: dist.all_gather_into_tensor(x, _half(x), group=g),
    "reduce_scatter": lambda x, g, r: dist.reduce_scatter(_half(x), [_half(x), _half(x)], group=g),
    "reduce_scatter_tensor": lambda x, g, r: dist.reduce_scatter_tensor(_half(x), x, group=g),
    "all_to_all": lambda x, g, r: dist.all_to_all(_lists(x, g), [x, x.clone()], group=g),
    "all_to_all_single": lambda x, g, r: dist.all_to_all_single(x.clone(), x, group=g),
    "gather": lambda x, g, r: dist.gather(x, _lists(x, g) if r == 0 else None, 0, group=g),
    "scatter": lambda x, g, r: dist.scatter(x, [x.clone(), x.clone()] if r == 0 else None, 0, group=g),
    "send and recv": lambda x, g, r: dist.send(x, 1, group=g) if r == 0 else dist.recv(x, 0, group=g),
    "isend and irecv": lambda x, g, r: (dist.isend(x, 1, group=g) if r == 0 else dist.irecv(x, 0, group=g)).wait(),
    "batch_isend_irecv": lambda x, g, r: [
        w.wait() for w in dist.batch_isend_irecv([dist.P2POp((dist.isend, dist.irecv)[r], x, 1 - r, group=g)])
    ],
}


# Ops that one rank may refuse alone.
ENDS = ("send and recv", "isend and irecv", "batch_isend_irecv", "gather", "scatter", "reduce")
SERVED = (torch.float64, torch.float32, torch.int32, torch.int64)


@pytest.mark.later
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.on("pair", timeout=300)
def test_every_op_of_every_dtype_ends_alike_on_both_ranks(r, options, part):
    """A group is made anew where an op has ended the last one."""
    r.init()
    group = None
    for dtype in DTYPES[part::4]:
        for name, op in OPS.items():
            if group is None:
                made = lc.Options(**OPTIONS[options])
                group = dist.new_group([0, 1], timeout=NEVER, backend="lowcomm", pg_options=made)
            x = torch.ones(N).to(dtype)
            error = ""
            try:
                op(x, group, r.rank)
            except (RuntimeError, ValueError, TypeError, NotImplementedError) as caught:
                error = type(caught).__name__
                assert str(caught), (name, dtype)
            every = [None] * r.size
            dist.all_gather_object(every, error)  # over the default group
            assert name in ENDS or all(every) == any(every), (name, dtype, every)
            assert name != "all_reduce" or dtype not in SERVED or not error, (dtype, error)
            if any(every):
                group = None
