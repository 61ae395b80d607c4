"""all_reduce, all_to_all, broadcast and gather of codes, and parts that differ in size: every rank ends with what the
definitions say, put together by hand from the codec alone."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fcol
from collective_cases import values
from compressed_by_hand import draw_key, last_step, options, reduced_by_hand

import torch_lowcomm as lc

SPECS = ("sym4:bucket=1024", "qsgd8:bucket=512", "minmax4:bucket=64", "gauss4", "topk:keep=0.1", "bf16")
SIZES = (1, 700, 5000, 130_001)


def everybodys(dtype, n, key, size):
    return [values(dtype, n, key, q) for q in range(size)]


def plain(t):
    dist.all_reduce(t)


def asynchronous(t):
    dist.all_reduce(t, async_op=True).wait()


def averaged(t):
    dist.all_reduce(t, op=dist.ReduceOp.AVG)


def functional(t):
    t.copy_(fcol.all_reduce(t, "sum", dist.group.WORLD))


def by_name(t):
    with lc.exact():  # says nothing to a codec that is asked for by name
        lc.all_reduce(t, codec=by_name.codec)


def by_future(t):
    dist.all_reduce(t, async_op=True).get_future().wait()


@pytest.mark.parametrize(
    "spec",
    [pytest.param(s, marks=pytest.mark.on("pair", *(["trio"] if s in SPECS[:2] else []), timeout=120)) for s in SPECS],
)
def test_every_all_reduce_is_the_coded_sum(r, spec):
    r.init("lowcomm", pg_options=options(f"all_reduce={spec}"))
    codec = lc.codec(spec)
    by_name.codec = spec
    wrong = []
    for form in (plain, asynchronous, averaged, functional, by_name, by_future):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for n in SIZES if form is plain else (5000,):
                everybody = everybodys(dtype, n, n, r.size)
                t = everybody[r.rank].clone()
                form(t)
                want = reduced_by_hand(codec, everybody, last_step(), average=form is averaged)
                if not torch.equal(t, want):
                    wrong.append(f"{form.__name__} {dtype} n={n}: {(t != want).sum().item()} differ")
    # Coalesced: a tensor takes a slot a slice.
    everybody = [everybodys(torch.float32, n, n, r.size) for n in (3000, 1, 70_001)]
    mine = [x[r.rank].clone() for x in everybody]
    with dist._coalescing_manager():
        for t in mine:
            dist.all_reduce(t)
    for i, (t, x) in enumerate(zip(mine, everybody, strict=True)):
        if not torch.equal(t, reduced_by_hand(codec, x, last_step(), slot=i * r.size)):
            wrong.append(f"coalesced, tensor {i}")
    # Strided memory is written where it is, and nowhere else.
    memory = torch.full((2, 4000), 7.0)
    everybody = everybodys(torch.float32, 4000, "strided", r.size)
    strided = memory.t()[:, 0]
    strided.copy_(everybody[r.rank])
    dist.all_reduce(strided)
    if not torch.equal(strided, reduced_by_hand(codec, everybody, last_step())) or not (memory[1] == 7).all():
        wrong.append("strided")
    assert not wrong, "\n".join(wrong)
    moved = lc.stats()[dist.group.WORLD.group_name]["all_reduce"]
    assert moved["exact_calls"] == 0, moved
    # Tensors that cannot be reduced by codes go exact, and are counted.
    for op, x in ((dist.ReduceOp.MAX, torch.ones(9000)), (dist.ReduceOp.SUM, torch.ones(9000, dtype=torch.int64))):
        dist.all_reduce(x, op=op)
        assert (x == (1 if op == dist.ReduceOp.MAX else r.size)).all()
    because = lc.stats()[dist.group.WORLD.group_name]["all_reduce"]["exact_because"]
    assert sum(because.values()) == 2, because


@pytest.mark.parametrize("spec", ["sym4:bucket=1024", "qsgd8:bucket=512"])
@pytest.mark.on("pair", "quad", timeout=60)
def test_every_all_to_all_gives_the_codecs_bits(r, spec):
    r.init("lowcomm", pg_options=options(f"all_to_all={spec}", min_bytes=4000 * r.size))
    codec = lc.codec(spec)

    def arrives(q, n, key):
        """Returns rank q's part of n elements for this rank."""
        x = values(torch.float32, n, key, q, r.rank)
        if q == r.rank or 4 * n < 4000:  # kept, or under min_bytes were every part so long
            return x
        return codec.roundtrip(x, seed=draw_key(), stream=(q << 16) + r.rank, step=last_step())

    def parts(counts, key):
        return [values(torch.float32, n, key, r.rank, q) for q, n in enumerate(counts)]

    n = 6000
    out = torch.empty(n * r.size)
    dist.all_to_all_single(out, torch.cat(parts([n] * r.size, "single")))
    assert torch.equal(out, torch.cat([arrives(q, n, "single") for q in range(r.size)]))
    out = torch.empty(n * r.size)
    dist.all_to_all(list(out.chunk(r.size)), parts([n] * r.size, "list"))
    assert torch.equal(out, torch.cat([arrives(q, n, "list") for q in range(r.size)]))
    count = {(q, p): (0, 500, 7000, 20_000)[(q + 2 * p) % 4] for q in range(r.size) for p in range(r.size)}
    sent, got = [count[r.rank, p] for p in range(r.size)], [count[q, r.rank] for q in range(r.size)]
    for form in ("plain", "async", "functional"):
        x = torch.cat(parts(sent, form))
        if form == "functional":
            out = fcol.all_to_all_single(x, got, sent, dist.group.WORLD).clone()
        else:
            out = torch.empty(sum(got))
            work = dist.all_to_all_single(out, x, got, sent, async_op=form == "async")
            assert work is None or work.wait()
        assert torch.equal(out, torch.cat([arrives(q, n, form) for q, n in enumerate(got)])), form
    ints = torch.arange(4 * r.size)
    dist.all_to_all_single(torch.empty_like(ints), ints)
    with lc.exact():
        exact = torch.empty(n * r.size)
        dist.all_to_all_single(exact, torch.cat(parts([n] * r.size, "exact")))
    assert torch.equal(exact, torch.cat([values(torch.float32, n, "exact", q, r.rank) for q in range(r.size)]))
    stats = lc.stats()[dist.group.WORLD.group_name]["all_to_all"]
    assert stats["exact_because"].get("inside lc.exact()") == 1, stats
    with pytest.raises(ValueError, match="split sizes"):
        dist.all_to_all_single(torch.empty(4 * r.size), torch.empty(4 * r.size), [1] * r.size, [3] * r.size)


@pytest.mark.parametrize("spec", ["sym4:bucket=1024", "qsgd8:bucket=512"])
@pytest.mark.on("pair", "trio", timeout=60)
def test_broadcast_and_gather_give_the_codecs_bits(r, spec):
    r.init("lowcomm", pg_options=options(f"broadcast={spec}; gather={spec}"))
    codec = lc.codec(spec)
    for dtype in (torch.float32, torch.bfloat16):
        for n in SIZES:
            for root in range(r.size):
                t = values(dtype, n, "broadcast", r.rank)
                dist.broadcast(t, root)
                stream, step = root << 16, last_step()
                want = codec.roundtrip(values(dtype, n, "broadcast", root), seed=draw_key(), stream=stream, step=step)
                assert torch.equal(t, want), (dtype, n, root)
                outputs = [torch.empty(n, dtype=dtype) for _ in range(r.size)] if r.rank == root else None
                dist.gather(values(dtype, n, "gather", r.rank), outputs, dst=root)
                for q, out in enumerate(outputs or []):
                    x = values(dtype, n, "gather", q)
                    want = codec.roundtrip(x, seed=draw_key(), stream=q << 16, step=last_step())
                    assert torch.equal(out, want), (dtype, n, root, q)
    for op in (lambda: dist.broadcast(torch.ones(100), 7), lambda: dist.gather(torch.ones(100), None, dst=7)):
        with pytest.raises(ValueError, match="root.*7"):
            op()
    objects = [{"any": "thing"}] if r.rank == 0 else [None]
    dist.broadcast_object_list(objects, 0)  # bytes: exact
    assert objects == [{"any": "thing"}]


@pytest.mark.on("pair", timeout=60)
def test_error_feedback_is_a_transaction(r):
    """A failed op leaves the residual as it was, and its state brings it back."""
    r.init("lowcomm")
    shape = (50, 41)
    residual = lc.Residual(torch.empty(shape))
    for step in range(3):
        x = values(torch.float32, 2050, step, r.rank).view(shape)
        lc.all_reduce(x, codec="sym4:bucket=128", residual=residual, async_op=True).wait()
    assert residual.value.abs().sum() > 0
    before = residual.state_dict()
    bad = torch.ones(shape)
    if r.rank == 1:
        bad[3, 3] = torch.nan
    with pytest.raises(ValueError if r.rank == 1 else dist.DistBackendError, match="nan"):
        lc.all_reduce(bad, codec="sym4:bucket=128", residual=residual)
    assert torch.equal(residual.value, before["value"])
    other = lc.Residual(torch.empty(shape))
    other.load_state_dict(before)
    a, b = torch.ones(shape), torch.ones(shape)
    lc.all_reduce(a, codec="sym4:bucket=128", residual=residual)
    lc.all_reduce(b, codec="sym4:bucket=128", residual=other)
    assert torch.equal(a, b)
    assert torch.equal(residual.value, other.value)

    for wrong, kwargs in (
        (torch.ones(7), {"codec": "sym4", "residual": residual}),
        (torch.ones(shape), {"codec": "sym4", "residual": residual, "op": dist.ReduceOp.MAX}),
        (torch.ones(shape), {"codec": "none"}),
        (torch.ones(shape), {"codec": "levels4"}),
    ):
        with pytest.raises(ValueError, match="expected"):
            lc.all_reduce(wrong, **kwargs)
    with pytest.raises(TypeError, match="Double"):
        lc.all_reduce(torch.ones(8, dtype=torch.float64), codec="sym4")
    with torch.inference_mode():
        inside = lc.Residual(torch.empty(8))
        lc.all_reduce(torch.ones(8), codec="sym4", residual=inside)
    lc.all_reduce(torch.ones(8), codec="sym4", residual=inside)
    with pytest.raises(ValueError, match="shape"):
        other.load_state_dict({"value": torch.ones(3)})
