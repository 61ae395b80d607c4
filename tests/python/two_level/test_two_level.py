"""lc.TwoLevel: what it gives is put together by hand from exact sums inside a host and the codec between hosts."""

import os
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from collective_cases import bits, values
from compressed_by_hand import reduced_by_hand
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torch_lowcomm as lc

SPEC = "sym4:bucket=1024"  # draws nothing: the same bytes in every group and step
SHAPES = [(2, 2), (1, 4), (4, 1)]  # hosts, ranks of a host
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


def mesh_of(shape, names=("hosts", "ranks")):
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def two_level(r, shape, codec=SPEC):
    r.init("lowcomm")
    return lc.TwoLevel(mesh_of(shape), codec=codec, timeout=timedelta(seconds=30))


def host_sum(parts, average, dtype=None):
    """In rank order in fp32, then the dtype."""
    total = parts[0].float()
    for x in parts[1:]:
        total = total + x.float()
    return (total / len(parts) if average else total).to(dtype or parts[0].dtype)


def all_reduced(codec, everybody, shape, average):
    hosts, ranks = shape
    sums = [host_sum(everybody[h * ranks : (h + 1) * ranks], average) for h in range(hosts)]
    out = sums[0].clone()
    length = -(-out.numel() // ranks)
    for first in range(0, out.numel(), length or 1) if hosts > 1 else ():
        piece = slice(first, first + length)
        out[piece] = reduced_by_hand(codec, [s[piece].contiguous() for s in sums], 0, average=average)
    return out


def expect_sum(r, two, n, shape=(2, 2)):
    everybody = [values(torch.float32, n, q) for q in range(r.size)]
    t = everybody[r.rank].clone()
    two.all_reduce(t)
    assert torch.equal(t, all_reduced(lc.codec(SPEC), everybody, shape, False))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.on("quad")
def test_all_reduce_is_the_exact_sum_inside_and_the_coded_one_between(r, shape):
    two, codec, wrong = two_level(r, shape), lc.codec(SPEC), []
    for op in (SUM, AVG):
        for dtype in DTYPES:
            for n in (0, 1, 3, 5000, 70_001):
                everybody = [values(dtype, n, n, q) for q in range(r.size)]
                t = everybody[r.rank].clone()
                assert two.all_reduce(t, op) is None
                if not torch.equal(bits(t), bits(all_reduced(codec, everybody, shape, op is AVG))):
                    wrong.append(f"{op} {dtype} n={n}")
    everybody = [values(torch.float32, 6000, "strided", q) for q in range(r.size)]
    memory = torch.full((2, 3000, 2), 7.0)
    strided = memory.permute(2, 1, 0)[0]
    strided.copy_(everybody[r.rank].view(3000, 2))
    two.all_reduce(strided)
    want = all_reduced(codec, everybody, shape, False)
    if not torch.equal(strided.reshape(-1), want) or not (memory.permute(2, 1, 0)[1] == 7).all():
        wrong.append("strided")
    parameter = torch.nn.Parameter(everybody[r.rank].clone())
    two.all_reduce(parameter)
    if not torch.equal(parameter.detach(), want) or parameter.grad_fn is not None:
        wrong.append("a leaf that requires a gradient")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.on("quad")
def test_all_gather_and_reduce_scatter_are_coded_between_hosts_only(r, shape):
    """As FSDP2 over hosts calls them."""
    hosts, ranks = shape
    two, codec, wrong = two_level(r, shape), lc.codec(SPEC), []

    for dtype in DTYPES:
        for n in (0, 1, 700, 20_001):
            everybody = [values(dtype, n, "gather", q) for q in range(r.size)]
            out = torch.empty(r.size * n, dtype=dtype)
            two._levels.all_gather(out, everybody[r.rank])
            if not torch.equal(
                bits(out), bits(torch.cat([x if hosts == 1 else codec.roundtrip(x) for x in everybody]))
            ):
                wrong.append(f"all_gather {dtype} n={n}")
            for op in (SUM, AVG):
                mine = torch.empty(n, dtype=dtype)
                whole = [values(dtype, n, "scatter", r.rank, p) for p in range(r.size)]
                two._levels.reduce_scatter(mine, torch.cat(whole), op)
                sums = [
                    host_sum([values(dtype, n, "scatter", h * ranks + p, r.rank) for p in range(ranks)], op is AVG)
                    for h in range(hosts)
                ]
                sums = [s if h == r.rank // ranks else codec.decode(codec.encode(s), n) for h, s in enumerate(sums)]
                want = host_sum(sums, op is AVG, dtype)
                if not torch.equal(bits(mine), bits(want)):
                    wrong.append(f"reduce_scatter {op} {dtype} n={n}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.on("quad")
def test_a_host_sends_one_coded_tensor(r):
    """Bytes on the slow link: of n elements a rank each of two ranks sends its half, of a gathered tensor its own once."""
    two, codec, n = two_level(r, (2, 2)), lc.codec(SPEC), 1 << 18
    two.all_reduce(values(torch.float32, n, r.rank))
    two._levels.all_gather(torch.empty(4 * n), values(torch.float32, n, r.rank))
    two._levels.reduce_scatter(torch.empty(n), values(torch.float32, 4 * n, r.rank), SUM)
    stats = lc.stats(two.between)[two.between.group_name]
    payload = {
        "all_reduce": 2 * codec.encoded_bytes(n // 4),  # half of the slice for its owner, and the sum of the other half
        "all_gather": codec.encoded_bytes(n),
        "reduce_scatter": codec.encoded_bytes(n),  # the host's sum for one rank of the other host
    }
    for op, least in payload.items():
        assert least <= stats[op]["wire_bytes"] <= 1.01 * least, (op, least, stats[op])
        assert stats[op]["exact_calls"] == 0, stats[op]
    inside = lc.stats(two.inside)[two.inside.group_name]
    assert all(inside[op]["exact_calls"] == inside[op]["calls"] for op in ("all_gather", "reduce_scatter")), inside


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.on("quad")
def test_error_feedback_of_a_slice_is_a_transaction(r, shape, average):
    """Nothing is lost over hosts and steps; a failed op leaves every rank's residual as it was, and the groups usable."""
    hosts, ranks = shape
    two, n, op = two_level(r, shape, "sym4:bucket=128"), 2051, AVG if average else SUM
    length = -(-n // ranks)
    place = slice(r.rank % ranks * length, (r.rank % ranks + 1) * length)
    residual = two.residual(torch.empty(n))
    came, applied = torch.zeros_like(residual.value).double(), torch.zeros_like(residual.value).double()
    first = r.rank // ranks * ranks
    for step in range(6):
        host = host_sum([values(torch.float32, n, step, q) for q in range(first, first + ranks)], average)
        t = values(torch.float32, n, step, r.rank)
        two.all_reduce(t, op, residual=residual)
        came += host[place].double()
        applied += t[place].double() * (hosts if average else 1)
    left = came - residual.value.double()
    dist.all_reduce(left, group=two.between)
    assert (residual.value.abs().sum() > 0) == (hosts > 1)
    torch.testing.assert_close(left, applied, rtol=0, atol=1e-4 * applied.abs().max().item())
    if hosts == 1:
        return
    before = residual.state_dict()["value"]
    bad = torch.ones(n)
    if r.rank == 3:
        bad[1] = torch.nan  # in the slice of each host's first rank
    expected = ValueError if r.rank == 3 // ranks * ranks else dist.DistBackendError
    with pytest.raises(expected, match="(?i)nan"):
        two.all_reduce(bad, op, residual=residual)
    assert torch.equal(residual.value, before)
    two.all_reduce(torch.ones(n), op, residual=residual)
    assert not torch.equal(residual.value, before)


@pytest.mark.on("quad")
def test_async_ops_run_in_the_order_of_issue(r):
    """Ops of one object run in the order of issue, waited for or not, next to the program's own ops."""
    two, codec, n = two_level(r, (2, 2)), lc.codec(SPEC), 30_000
    everybody = [[values(torch.float32, n, i, q) for q in range(r.size)] for i in range(4)]
    mine = [x[r.rank].clone() for x in everybody]
    futures = [two.all_reduce(t, async_op=True) for t in mine[:3]]
    other = torch.ones(n)
    dist.all_reduce(other)
    doubled = futures[0].then(lambda done: done.value() * 2)
    two.all_reduce(mine[3])
    assert all(future.done() for future in futures)  # what was issued before has ended before
    for x, t in zip(everybody, mine, strict=True):
        assert torch.equal(t, all_reduced(codec, x, (2, 2), False))
    assert futures[1].wait() is mine[1]
    assert torch.equal(doubled.wait(), 2 * mine[0])
    assert (other == r.size).all()
    begun = threading.Event()
    two._queue.issue(begun.wait, mine[:1], True)  # the callback is there before its op has ended, so the worker runs it
    waits = two.all_reduce(mine[0], async_op=True).then(lambda done: two.all_reduce(done.value()))
    begun.set()
    with pytest.raises(Exception, match="async_op=True"):
        waits.wait()
    failed = two.all_reduce(torch.full((n,), torch.nan), async_op=True)
    with pytest.raises(ValueError, match="(?i)nan"):
        failed.wait()


@pytest.mark.on("quad")
def test_mistakes(r):
    """A caller's mistakes raise before anything is sent: the next op works."""
    two, n = two_level(r, (2, 2)), 4001
    mesh = mesh_of((2, 2))
    for error, words, call in (
        (TypeError, "float64", lambda: two.all_reduce(torch.ones(n, dtype=torch.float64))),
        (ValueError, "SUM or AVG", lambda: two.all_reduce(torch.ones(n), dist.ReduceOp.MAX)),
        (
            ValueError,
            f"{n // 2 + (r.rank % 2 == 0)} elements of {n}, got one of {n}",
            lambda: two.all_reduce(torch.ones(n), residual=lc.Residual(torch.ones(n))),
        ),
        (ValueError, "sym99", lambda: lc.TwoLevel(mesh, codec="sym99")),
        (ValueError, "flat", lambda: lc.TwoLevel(mesh, codec="none")),
        (ValueError, "flat", lambda: lc.TwoLevel(mesh, codec="sym4:axis=channel")),
        (ValueError, "got 1 dimensions", lambda: lc.TwoLevel(mesh_of((4,), ("a",)), codec=SPEC)),
    ):
        with pytest.raises(error, match=words):
            call()
    expect_sum(r, two, n)


@pytest.mark.parametrize("odd", [(1,), (1, 3), (2, 3)])
@pytest.mark.on("quad")
def test_codecs_that_differ_are_told_on_every_rank(r, odd):
    r.init("lowcomm")
    with pytest.raises(dist.DistBackendError, match=r"(?s)sym4.*sym8|sym8.*sym4"):
        lc.TwoLevel(mesh_of((2, 2)), codec="sym8" if r.rank in odd else "sym4")


@pytest.mark.on("quad")
def test_hosts_whose_ranks_are_not_in_a_row(r):
    r.init("lowcomm")
    two = lc.TwoLevel(DeviceMesh("cpu", [[0, 2], [1, 3]]), codec=SPEC)
    out = torch.empty(4 * 2000)
    two._levels.all_gather(out, values(torch.float32, 2000, r.rank))
    codec = lc.codec(SPEC)
    assert torch.equal(out, torch.cat([codec.roundtrip(values(torch.float32, 2000, q)) for q in (0, 2, 1, 3)]))


@pytest.mark.on("quad")
def test_without_a_mesh_ranks_of_one_network_namespace_are_a_host(r):
    r.init("lowcomm")
    expect_sum(r, lc.TwoLevel(codec=SPEC), 5001, (1, 4))


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter"])
@pytest.mark.on("quad", timeout=50)
def test_what_fails_inside_a_host_is_told_to_the_others(r, name):
    """Sizes that differ inside one host: found there, and told to the other one, which would wait for its sums."""
    two, n = two_level(r, (2, 2)), 4000
    m = n + 4 * (r.rank == 3)
    with pytest.raises(
        dist.DistBackendError, match="elements a rank differs" if r.rank > 1 else "op differs.*all_gather"
    ):
        if name == "all_reduce":
            two.all_reduce(torch.ones(m))
        else:
            two._levels.reduce_scatter(torch.ones(m // 4), torch.ones(m), SUM)
    expect_sum(r, lc.TwoLevel(mesh_of((2, 2)), codec=SPEC), n)


@pytest.mark.on(4, timeout=60, allow_exit={3: 7})
def test_a_rank_that_dies_is_an_error_on_every_other(r):
    two, n = two_level(r, (2, 2)), 40_000
    residual = two.residual(torch.empty(n))
    two.all_reduce(values(torch.float32, n, r.rank), residual=residual)
    before = residual.state_dict()["value"]
    dist.barrier()
    if r.rank == 3:
        os._exit(7)
    with pytest.raises(dist.DistBackendError):
        two.all_reduce(values(torch.float32, n, r.rank), residual=residual)
    assert torch.equal(residual.value, before)
