"""The collectives as functions of a `Case`, and data every rank can compute for every other.

`COLLECTIVES` maps a name to a function `Case -> list of tensors`: it makes this rank's inputs, runs the op on `case.group` and
returns what the op wrote. The same case on two groups must give the same bits.
"""

import dataclasses
import functools
import itertools
import zlib

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fcol

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
OTHERS = (torch.bool, torch.int16, torch.complex64, torch.complex128, torch.float8_e4m3fn)
UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def values(dtype, n, *key):
    """`n` values that depend on the key alone: floats over a wide range of magnitudes, integers over their whole range."""
    return _drawn(dtype, n, *key).clone()


@functools.lru_cache(maxsize=64)  # a sweep asks for the same ones with every collective, on each group, for every rank
def _drawn(dtype, n, *key):
    g = torch.Generator().manual_seed(zlib.crc32(repr((str(dtype), n, *key)).encode()))
    if dtype.is_complex:
        return torch.randn(n, dtype=dtype, generator=g)
    if dtype == torch.bool:
        return torch.randint(0, 2, (n,), generator=g).bool()
    if dtype.is_floating_point:
        x = torch.randn(n, dtype=torch.float64, generator=g) * 4.0 ** torch.randint(-3, 3, (n,), generator=g)
        return x.to(dtype)
    info = torch.iinfo(dtype)
    high = min(info.max, 2**62)
    return torch.randint(max(info.min, -(2**62)), high, (n,), generator=g).to(dtype)


@dataclasses.dataclass
class Case:
    """One call: who calls it on what. `group`, `rank` and `size` are the caller's; the rest names the case."""

    group: object
    rank: int
    size: int
    dtype: torch.dtype = torch.float32
    n: int = 5
    layout: str = "dense"  # dense, strided (every second element), transposed (dense, but not contiguous)
    op: object = None  # a reduce op
    asynchronous: bool = False
    root: int = 0
    seed: int = 0

    def x(self, slot, n=None, rank=None):
        """This rank's tensor number `slot`, in the case's layout."""
        n = self.n if n is None else n
        return arrange(values(self.dtype, n, self.seed, slot, self.rank if rank is None else rank), self.layout)

    def out(self, n=None):
        """A place for a result, in the case's layout, filled with something that is no result."""
        n = self.n if n is None else n
        return arrange(values(self.dtype, n, "out", self.rank), self.layout)

    def done(self, work):
        """Waits, if there is something to wait for."""
        if self.asynchronous:
            work.wait()

    def kwargs(self):
        return {"group": self.group, "async_op": self.asynchronous}

    def reduce(self):
        return {"op": self.op if self.op is not None else dist.ReduceOp.SUM, **self.kwargs()}


def arrange(x, layout):
    if layout == "dense" or x.numel() == 0:
        return x
    if layout == "strided":
        wide = torch.zeros(2 * x.numel(), dtype=x.dtype)
        wide[::2] = x
        return wide[::2]
    rows = next(k for k in (4, 2, 5, 3, 1) if x.numel() % k == 0)
    return x.reshape(rows, -1).t().contiguous().t()


def broadcast(c):
    t = c.x(0)
    c.done(dist.broadcast(t, group=c.group, group_src=c.root, async_op=c.asynchronous))
    return [t]


def all_reduce(c):
    t = c.x(0)
    c.done(dist.all_reduce(t, **c.reduce()))
    return [t]


def all_reduce_coalesced(c):
    ts = [c.x(0), c.x(1, c.n + 3), c.x(2, 1)]
    c.done(dist.all_reduce_coalesced(ts, **c.reduce()))
    return ts


def reduce(c):
    t = c.x(0)
    c.done(dist.reduce(t, group_dst=c.root, **c.reduce()))
    return [t] if c.rank == c.root else []


def all_gather(c):
    outs = [c.out() for _ in range(c.size)]
    c.done(dist.all_gather(outs, c.x(0), **c.kwargs()))
    return outs


def all_gather_into_tensor(c):
    out = c.out(c.n * c.size)
    c.done(dist.all_gather_into_tensor(out, c.x(0), **c.kwargs()))
    return [out]


def all_gather_into_tensor_in_place(c):
    """As FSDP2 calls it: the input is a view of the output."""
    out = values(c.dtype, c.n * c.size, "out", c.rank)
    mine = out[c.n * c.rank : c.n * (c.rank + 1)]
    mine.copy_(c.x(0))
    c.done(dist.all_gather_into_tensor(out, mine, **c.kwargs()))
    return [out]


def all_gather_into_tensor_stacked(c):
    """The output with one more dimension than the input."""
    out = values(c.dtype, c.n * c.size, "out", c.rank).reshape(c.size, c.n)
    c.done(dist.all_gather_into_tensor(out, c.x(0).reshape(-1), **c.kwargs()))
    return [out]


def all_gather_coalesced(c):
    outs = [[c.out(), c.out(c.n + 2)] for _ in range(c.size)]
    c.done(dist.all_gather_coalesced(outs, [c.x(0), c.x(1, c.n + 2)], **c.kwargs()))
    return list(itertools.chain(*outs))


def all_gather_coalescing_manager(c):
    outs = [c.out(c.n * c.size), c.out((c.n + 2) * c.size)]
    with dist.distributed_c10d._coalescing_manager(c.group, async_ops=c.asynchronous) as manager:
        dist.all_gather_into_tensor(outs[0], c.x(0), group=c.group)
        dist.all_gather_into_tensor(outs[1], c.x(1, c.n + 2), group=c.group)
    c.done(manager)
    return outs


def all_gather_functional(c):
    return [fcol.wait_tensor(fcol.all_gather_tensor(c.x(0), 0, c.group))]


def all_gather_functional_coalesced(c):
    outs = fcol.all_gather_into_tensor_coalesced([c.x(0), c.x(1, c.n + 2)], c.group)
    return [fcol.wait_tensor(t) for t in outs]


def gather(c):
    outs = [c.out() for _ in range(c.size)] if c.rank == c.root else None
    c.done(dist.gather(c.x(0), outs, group_dst=c.root, **c.kwargs()))
    return outs or []


def scatter(c):
    out = c.out()
    ins = [c.x(s) for s in range(c.size)] if c.rank == c.root else None
    c.done(dist.scatter(out, ins, group_src=c.root, **c.kwargs()))
    return [out]


def reduce_scatter(c):
    out = c.out()
    c.done(dist.reduce_scatter(out, [c.x(s) for s in range(c.size)], **c.reduce()))
    return [out]


def reduce_scatter_tensor(c):
    out = c.out()
    c.done(dist.reduce_scatter_tensor(out, c.x(0, c.n * c.size), **c.reduce()))
    return [out]


def reduce_scatter_tensor_in_place(c):
    """The output is a view of the input."""
    whole = values(c.dtype, c.n * c.size, c.seed, 0, c.rank)
    out = whole[c.n * c.rank : c.n * (c.rank + 1)]
    c.done(dist.reduce_scatter_tensor(out, whole, **c.reduce()))
    return [out]


def reduce_scatter_coalescing_manager(c):
    outs = [c.out(), c.out(c.n + 2)]
    with dist.distributed_c10d._coalescing_manager(c.group, async_ops=c.asynchronous) as manager:
        for slot, out in enumerate(outs):
            whole = c.x(slot, out.numel() * c.size)
            dist.reduce_scatter_tensor(out, whole, op=c.reduce()["op"], group=c.group)
    c.done(manager)
    return outs


def all_reduce_coalescing_manager(c):
    ts = [c.x(0), c.x(1, c.n + 2)]
    with dist.distributed_c10d._coalescing_manager(c.group, async_ops=c.asynchronous) as manager:
        for t in ts:
            dist.all_reduce(t, op=c.reduce()["op"], group=c.group)
    c.done(manager)
    return ts


FUNCTIONAL = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "avg", dist.ReduceOp.MAX: "max", None: "sum"}


def all_reduce_functional(c):
    return [fcol.wait_tensor(fcol.all_reduce(c.x(0), FUNCTIONAL[c.op], c.group))]


def all_reduce_functional_coalesced(c):
    return [fcol.wait_tensor(t) for t in fcol.all_reduce_coalesced([c.x(0), c.x(1)], FUNCTIONAL[c.op], c.group)]


def reduce_scatter_functional(c):
    return [fcol.wait_tensor(fcol.reduce_scatter_tensor(c.x(0, c.n * c.size), FUNCTIONAL[c.op], 0, c.group))]


def reduce_scatter_functional_coalesced(c):
    ins = [c.x(0, c.n * c.size), c.x(1, (c.n + 2) * c.size)]
    outs = fcol.reduce_scatter_tensor_coalesced(ins, FUNCTIONAL[c.op], [0, 0], c.group)
    return [fcol.wait_tensor(t) for t in outs]


def all_to_all_single(c):
    out = c.out(c.n * c.size)
    c.done(dist.all_to_all_single(out, c.x(0, c.n * c.size), **c.kwargs()))
    return [out]


def all_to_all_single_splits(c):
    """Rank r sends (r + s) mod 3 rows to rank s: uneven, some of them none."""
    width = max(c.n, 1)
    sends = [(c.rank + s) % 3 for s in range(c.size)]
    takes = [(s + c.rank) % 3 for s in range(c.size)]
    x = values(c.dtype, sum(sends) * width, c.seed, 0, c.rank).reshape(-1, width)
    out = values(c.dtype, sum(takes) * width, "out", c.rank).reshape(-1, width)
    c.done(dist.all_to_all_single(out, x, takes, sends, **c.kwargs()))
    return [out]


def all_to_all_functional(c):
    return [fcol.wait_tensor(fcol.all_to_all_single(c.x(0, c.n * c.size), None, None, c.group))]


def all_to_all(c):
    outs = [c.out() for _ in range(c.size)]
    c.done(dist.all_to_all(outs, [c.x(s) for s in range(c.size)], **c.kwargs()))
    return outs


# Ops that gloo refuses and that must work; their results are computed from the data alone.
BY_HAND = {
    all_gather_into_tensor_stacked: lambda c: [torch.stack([c.x(0, rank=q) for q in range(c.size)])],
}


PLAIN = (
    broadcast,
    all_gather,
    all_gather_into_tensor,
    all_gather_into_tensor_in_place,
    all_gather_into_tensor_stacked,
    all_gather_coalesced,
    all_gather_coalescing_manager,
    all_gather_functional,
    all_gather_functional_coalesced,
    gather,
    scatter,
    all_to_all_single,
    all_to_all_single_splits,
    all_to_all_functional,
    all_to_all,
)
REDUCING = (
    all_reduce,
    all_reduce_coalesced,
    all_reduce_coalescing_manager,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    reduce_scatter_tensor_in_place,
    reduce_scatter_coalescing_manager,
)
FUNCTIONAL_REDUCING = (
    all_reduce_functional,
    all_reduce_functional_coalesced,
    reduce_scatter_functional,
    reduce_scatter_functional_coalesced,
)


def rooted(options, root):
    """The options of an op of c10d's own, with this root."""
    options.rootRank = root
    return options


def bits(t):
    """The tensor's values as bytes: equal bits, whatever NaN or -0 compare to."""
    t = t.detach()
    return torch.empty(t.numel(), dtype=t.dtype).copy_(t.reshape(-1)).view(torch.uint8)


def attempt(collective, case):
    """Returns the collective's result: its tensors, or the error it refuses with."""
    try:
        return collective(case)
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError) as e:
        return e
