"""An op that the policy names meets on one lane: ranks that decide differently whether and how it is coded hear of it at once."""

import contextlib
import re

import pytest
import torch
import torch.distributed as dist
from group_check import check_group

import torch_lowcomm as lc

CODEC = "sym4:bucket=1024"
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "gather")
POLICY = "; ".join(f"{op}={CODEC}" for op in OPS)
MIN_BYTES = 4096
N = 4608  # elements a rank: coded
OTHER = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
NEVER_S = 120  # far beyond what a test may take: a rank that waits for another lane fails by the pool's deadline


def _init(r, policy=POLICY):
    r.init("lowcomm", timeout_s=NEVER_S, pg_options=lc.Options(policy=policy, min_bytes=MIN_BYTES))


def _issue(op, x, size, rank, reduce_op=dist.ReduceOp.SUM, outs=()):
    """One call of `op` that sends `x`, whose first dimension is a multiple of the ranks; coalesced where several are `outs`."""
    if op == "all_reduce":
        dist.all_reduce(x, op=reduce_op)
    elif op == "all_reduce_coalesced":
        dist.all_reduce_coalesced([x, torch.ones(3, dtype=x.dtype)], op=reduce_op)
    elif op in OTHER:
        with dist.distributed_c10d._coalescing_manager() if len(outs) > 1 else contextlib.nullcontext():
            for out in outs:
                if op == "all_gather":
                    dist.all_gather_into_tensor(out, x)
                else:
                    dist.reduce_scatter_tensor(out, x, op=reduce_op)
    elif op == "all_to_all":
        dist.all_to_all_single(torch.empty_like(x), x)
    elif op == "broadcast":
        dist.broadcast(x, 0)
    else:
        dist.gather(x, [torch.empty_like(x) for _ in range(size)] if rank == 0 else None, dst=0)


def _values(op, cause, size):
    """(field, what the others say, what the odd rank says), of calls that differ by `cause`."""
    elements = {"reduce_scatter": N // size}.get(op, N)
    few = {"reduce_scatter": N // 8 // size}.get(op, N // 8)
    return {
        "exact scope": ("codec", CODEC, "none"),
        "dtype": ("dtype", "float32", "int32"),
        "wide dtype": ("dtype", "float32", "float64"),
        "bool": ("dtype", "float32", "bool"),
        "opaque dtype": ("dtype", "UInt16", "Float8_e4m3fn"),  # the wire carries both as bytes
        "size": ("elements a rank", str(elements), str(few)),
        "reduce op": ("reduce op", "sum", "max"),
        "op": ("op", op, OTHER.get(op)),
        "count": ("tensors", "2", "3"),
    }[cause]


def _differences():
    """(op, cause, policy), by pools: each cause where the policy names the op, and exact ops of three ranks."""
    for op in (*OPS, "all_reduce_coalesced"):
        more = ("reduce op",) * ("reduce" in op) + ("op", "count") * (op in OTHER)
        for cause in ("exact scope", "dtype", "wide dtype", "bool", "size", *more):
            yield "pair", op, cause, POLICY
    yield from (("quad", op, "exact scope", POLICY) for op in ("all_reduce", "all_to_all", "broadcast"))
    yield from (("trio", op, cause, "") for op in OTHER for cause in ("size", "dtype", "op", "count"))
    yield from (
        ("trio", op, cause, "") for op, cause in (("reduce_scatter", "reduce op"), ("all_gather", "opaque dtype"))
    )


@pytest.mark.parametrize(
    ("op", "cause", "policy"),
    [pytest.param(*case, marks=pytest.mark.on(pool, timeout=30)) for pool, *case in _differences()],
)
def test_every_cause_of_a_difference_is_named(r, op, cause, policy):
    """One rank makes another call: every rank hears which field differs, both values, and whose they are."""
    _init(r, policy)
    odd_one = 0 if cause in ("dtype", "op") else r.size - 1
    odd = r.rank == odd_one
    usual, other = torch.float32, {"dtype": torch.int32, "wide dtype": torch.float64, "bool": torch.bool}.get(cause)
    if cause == "opaque dtype":
        usual, other = torch.uint16, torch.float8_e4m3fn
    n = N // 8 if cause == "size" and odd else 2 * N if cause == "opaque dtype" and odd else N
    x = torch.ones(n).to(other or usual if odd else usual)
    mine = OTHER[op] if cause == "op" and odd else op
    out = x.repeat(r.size) if mine == "all_gather" else x[: n // r.size]
    outs = [torch.full_like(out, 7) for _ in range(2 + odd if cause == "count" else 1)]
    before = [out.float() for out in outs]
    reduce_op = dist.ReduceOp.MAX if cause == "reduce op" and odd else dist.ReduceOp.SUM
    scope = lc.exact() if cause == "exact scope" and odd else contextlib.nullcontext()
    with pytest.raises(dist.DistBackendError) as failure, scope:
        _issue(mine, x, r.size, r.rank, reduce_op, outs)
    message = str(failure.value)
    told = re.search(r"([a-z ]+) differs: rank (\d+) has '([^']*)', rank (\d+) has '([^']*)'", message)
    assert told, message
    values = {int(told[2]): told[3], int(told[4]): told[5]}
    if op == "all_to_all" and cause in ("exact scope", "size"):  # described pair by pair
        assert told[1].endswith("parts"), message
        assert len(set(values.values())) == 2, message
    else:
        field, usual, unusual = _values(op, cause, r.size)
        if op == "all_reduce_coalesced" and cause == "size":
            usual, unusual = f"{usual},3", f"{unusual},3"
        assert told[1].endswith(field), message
        assert values.pop(odd_one) == unusual, message
        assert list(values.values()) == [usual], message
    assert all(torch.equal(out.float(), kept) for out, kept in zip(outs, before, strict=True)), (
        "nothing is taken before"
    )
    # The group is alive: coded and exact ops go on.
    y = torch.ones(N)
    dist.all_reduce(y)
    torch.testing.assert_close(y, torch.full((N,), float(r.size)), rtol=0.3, atol=0)
    check_group(r)


@pytest.mark.on("pair", timeout=60)
def test_several_tensors_in_one_call(r):
    """A list of tensors in one call has gloo's meaning: they are one tensor; exact, whatever the policy says of all_reduce."""
    _init(r, "all_reduce=sym4")
    plain = dist.new_group(backend="gloo")
    results = []
    for backend in (lc.groups.backend_of(), plain._get_backend(torch.device("cpu"))):
        a, b = torch.full((N,), 1.0 + r.rank), torch.full((N,), 10.0 + r.rank)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            options = dist.AllreduceOptions()
            options.reduceOp = op
            results.append([a.clone(), b.clone()])
            backend.allreduce(results[-1], options).wait()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 1
        results.append([a.clone(), b.clone()])
        backend.broadcast(results[-1], options).wait()
    for ours, gloos in zip(results[:5], results[5:], strict=True):
        assert all(map(torch.equal, ours, gloos)), (ours, gloos)
    stats = lc.stats()[dist.group.WORLD.group_name]
    assert stats["all_reduce"]["exact_because"]["several tensors in one call"] == 4
    with pytest.raises(ValueError, match="all_reduce of several tensors: expected host tensors as the first"):
        lc.groups.backend_of().allreduce([torch.ones(N), torch.ones(N - 1)])
    with pytest.raises(ValueError, match="broadcast: expected a root tensor of 0...1, got 2"):
        options.rootRank, options.rootTensor = r.rank, 2
        lc.groups.backend_of().broadcast([torch.ones(N), torch.ones(N)], options)
    check_group(r)


@pytest.mark.on("pair", "quad", timeout=60)
def test_sparse_tensors_keep_no_caller_waiting(r):
    """Asynchronous calls of sparse and dense tensors keep their order; one that meets a dense one is named."""
    _init(r)
    late = r.rank == r.size - 1
    sparse, dense, counts = torch.eye(4).to_sparse(), torch.ones(3), torch.full((2,), r.rank + 1.0)
    if late:
        for rank in range(r.size - 1):
            r.hear(f"rank {rank} has issued all")
    works = [
        dist.all_reduce(sparse, async_op=True),
        dist.reduce(dense, 0, async_op=True),
        dist.all_reduce(torch.ones(N), async_op=True),
        dist.all_reduce(torch.eye(4).to_sparse() if late else torch.ones(N), async_op=True),
        dist.reduce(counts, 0, async_op=True),
    ]
    r.say(f"rank {r.rank} has issued all")  # without waiting for the one that is late
    for k, work in enumerate(works):
        if k == 3:
            with pytest.raises(dist.DistBackendError, match="dtype differs: .*sparse"):
                work.wait()
        else:
            work.wait()
    assert torch.equal(sparse.to_dense(), r.size * torch.eye(4))
    if r.rank == 0:
        assert torch.equal(dense, torch.full((3,), float(r.size)))
        assert torch.equal(counts, torch.full((2,), r.size * (r.size + 1) / 2))
    dist.barrier()
    with pytest.raises(ValueError, match="all_reduce of a sparse tensor: expected SUM, got max"):
        dist.all_reduce(torch.eye(4).to_sparse(), op=dist.ReduceOp.MAX)
    check_group(r)


def test_shapes_that_differ(r):
    """c10d does not compare shapes: a broadcast of one view into another one is a legal program."""
    _init(r)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    y = x.clone().view(-1) if r.rank == 0 else torch.zeros(64, 64)
    dist.broadcast(y, 0)

    assert torch.equal(y.view(-1), lc.codec(CODEC).roundtrip(x.view(-1)))
    for op in ("all_reduce", "broadcast", "gather", "all_to_all"):
        with pytest.raises(ValueError, match=f"{op}: expected a codec that does not follow a tensor's shape"):
            lc.set_policy(None, f"{op}=sym8:axis=channel")


def test_mistakes_leave_the_numbers(r):
    """A caller's mistake on one rank takes no number: the ranks stay in step."""
    _init(r, "all_gather=sym8:axis=channel; reduce_scatter=sym8:axis=channel")
    shapes = [(32, 40), (40, 16), (24, 8)][: r.size]
    # Each part by its own shape, which every rank has.
    outs = [torch.empty(s) for s in shapes]
    mine = torch.randn(shapes[r.rank])
    dist.all_gather(outs, mine)

    assert torch.equal(outs[r.rank], lc.codec("sym8:axis=channel").roundtrip(mine))
    if r.rank == 0:
        with pytest.raises(ValueError, match="expected"):
            dist.all_gather_into_tensor(torch.empty(3), torch.ones(2))
        with pytest.raises(ValueError, match="expected"):
            dist.reduce_scatter_tensor(torch.empty(3), torch.ones(2))
    check_group(r)
