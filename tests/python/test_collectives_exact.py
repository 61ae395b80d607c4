"""Without a policy every collective gives gloo's bits: lowcomm and gloo side by side in the same processes.

At two ranks each result is bit-equal. At four it is where no floating sum depends on the order; else every rank ends with
the same bits, within (W-1)*u*sum|x_i| of the exact sum, u the dtype's unit.
"""

import datetime
import itertools
import time

import collective_cases as cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fcol
from collective_cases import Case, bits, values

SUM, AVG, MIN, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX
PRODUCT, BAND, BOR, BXOR = dist.ReduceOp.PRODUCT, dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR
OWN = ("all_gather", "reduce_scatter")  # lowcomm's own exchange
REDUCE_OPS = (SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR)


def _groups(r):
    """lowcomm as the world, gloo beside it."""
    r.init("lowcomm", timeout_s=20)
    return dist.group.WORLD, dist.new_group(backend="gloo")


def _attempt(collective, case):
    try:
        return collective(case)
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError) as e:
        return e


class Sweep:
    """Runs cases on both groups, collects what differs, and counts what was compared and what gloo refuses."""

    def __init__(self, r):
        self.r = r
        self.ours, self.gloo = _groups(r)
        self.wrong = []
        self.compared = {}
        self.refused = set()

    def check(self, collective, **fields):
        if len(self.wrong) >= 20:
            return
        name = collective.__name__
        where = {"rank": self.r.rank, "size": self.r.size, **fields}
        label = f"{name} {' '.join(f'{k}={v}' for k, v in fields.items())}"
        # Gloo's own answer for a layout that is not dense may be wrong, or worse: it is asked for the dense one.
        want = _attempt(collective, Case(self.gloo, **{**where, "layout": "dense"}))
        if isinstance(want, Exception):
            self.refused.add((name, str(fields.get("dtype")), str(fields.get("op"))))
            want = cases.BY_HAND[collective](Case(None, **where)) if collective in cases.BY_HAND else None
        got = _attempt(collective, Case(self.ours, **where))
        if want is None:
            return  # neither has to work; it must only have come back
        if where.get("layout", "dense") != "dense":
            if isinstance(got, ValueError) and not name.startswith(OWN):
                return  # gloo's to refuse
            want = [w.reshape(-1) for w in want]
            got = got if isinstance(got, Exception) else [g.reshape(-1) for g in got]
        if isinstance(got, Exception):
            self.wrong.append(f"{label}: {type(got).__name__}: {str(got)[:300]}")
            return
        self.compared[name] = self.compared.get(name, 0) + 1
        exact = self._exact(collective, fields)
        for k, (g, w) in enumerate(zip(got, want, strict=True)):
            if g.shape != w.shape or g.dtype != w.dtype:
                self.wrong.append(f"{label}: tensor {k} is {g.dtype}{list(g.shape)}, gloo's {w.dtype}{list(w.shape)}")
            elif exact and not torch.equal(bits(g), bits(w)):
                g, w = g.reshape(-1), w.reshape(-1)
                at = (g != w).nonzero().flatten()[:3].tolist()
                self.wrong.append(f"{label}: tensor {k} differs from gloo's at {at}: {g[at]} for {w[at]}")

    def _exact(self, collective, fields):
        sums = collective in cases.REDUCING + cases.FUNCTIONAL_REDUCING
        dtype = fields.get("dtype", torch.float32)
        order = fields.get("op") in (SUM, AVG, PRODUCT, None) and (dtype.is_floating_point or dtype.is_complex)
        return self.r.size == 2 or not (sums and order)

    def end(self):
        assert not self.wrong, f"{len(self.wrong)} or more cases differ:\n" + "\n".join(self.wrong)
        return self.compared, self.refused


def _plain(r):
    """Ops that move values: every dtype, size and layout."""
    sweep = Sweep(r)
    dtypes = cases.FLOATS + cases.INTEGERS + cases.OTHERS
    for collective in cases.PLAIN:
        for dtype, n in itertools.product(dtypes, (0, 1, 5)):
            sweep.check(collective, dtype=dtype, n=n, seed=n)
        layouts = () if collective is cases.all_gather_into_tensor_in_place else ("strided", "transposed")
        for dtype, layout, n in itertools.product((torch.float32, torch.int64), layouts, (1, 20)):
            sweep.check(collective, dtype=dtype, n=n, layout=layout)
        for dtype, n in itertools.product((torch.float32, torch.bfloat16), (0, 1000, 300_007)):
            sweep.check(collective, dtype=dtype, n=n, asynchronous=True)
        if collective in (cases.broadcast, cases.gather, cases.scatter):
            for root, asynchronous in itertools.product(range(r.size), (False, True)):
                sweep.check(collective, n=17, root=root, asynchronous=asynchronous)
    return sweep.end()


def _reducing(r):
    """Ops that combine values: every dtype, reduce op, size and layout."""
    sweep = Sweep(r)
    dtypes = cases.FLOATS + cases.INTEGERS + cases.OTHERS
    for collective in cases.REDUCING:
        for dtype, op in itertools.product(dtypes, REDUCE_OPS):
            sweep.check(collective, dtype=dtype, op=op, n=5)
        for dtype, op, n in itertools.product((torch.float32, torch.bfloat16, torch.int32), (SUM, AVG, MAX), (0, 1)):
            sweep.check(collective, dtype=dtype, op=op, n=n)
        layouts = () if collective is cases.reduce_scatter_tensor_in_place else ("strided", "transposed")
        for dtype, layout in itertools.product((torch.float32, torch.int64), layouts):
            sweep.check(collective, dtype=dtype, op=SUM, n=20, layout=layout)
        for dtype, n in itertools.product(
            (torch.float32, torch.float16, torch.bfloat16, torch.float64), (0, 1000, 300_007)
        ):
            sweep.check(collective, dtype=dtype, op=SUM, n=n, asynchronous=True)
        if collective is cases.reduce:
            for root, asynchronous in itertools.product(range(r.size), (False, True)):
                sweep.check(collective, n=17, root=root, asynchronous=asynchronous)
    for collective, op, n in itertools.product(cases.FUNCTIONAL_REDUCING, (SUM, AVG, MAX), (0, 5, 1000)):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            sweep.check(collective, dtype=dtype, op=op, n=n)
    return sweep.end()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sweep", [_plain, _reducing], ids=["plain", "reducing"])
def test_every_collective_gives_gloos_bits(request, sweep, size):
    compared, refused = request.getfixturevalue({2: "pair", 4: "quad"}[size])(sweep, timeout=180)[0]
    names = cases.PLAIN if sweep is _plain else cases.REDUCING + cases.FUNCTIONAL_REDUCING
    missing = [c.__name__ for c in names if not compared.get(c.__name__)]
    assert not missing, f"compared nothing for {missing}; gloo refuses {sorted(refused)[:10]}"


def _sums(r, size_of):
    """Floating sums of lowcomm alone, against sums in fp64 of data that every rank can compute."""
    r.init("lowcomm")
    wrong = []
    for dtype, n, op in itertools.product(cases.FLOATS, size_of, (SUM, AVG)):
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


def test_sums_are_close_deterministic_and_equal_on_all_ranks(pair, quad):
    pair(_sums, (3, 4099))
    quad(_sums, (3, 4099, 270_001))


def _premul(r):
    """gloo refuses PREMUL_SUM (FSDP2's gradient divide factor); every reducing op of ours takes it."""
    r.init("lowcomm")
    wrong = []
    for factor, dtype, n in itertools.product((0.25, 1 / 3), cases.FLOATS, (0, 1, 2000)):
        u = cases.UNIT[dtype]
        for collective in (cases.all_reduce, cases.reduce, cases.reduce_scatter, cases.reduce_scatter_tensor):
            case = Case(dist.group.WORLD, r.rank, r.size, dtype=dtype, n=n, op=dist._make_nccl_premul_sum(factor))
            got = _attempt(collective, case)
            if isinstance(got, Exception):
                wrong.append(f"{collective.__name__} {dtype} n={n}: {type(got).__name__}: {got}")
                continue
            slots = {cases.reduce_scatter: (r.rank, n), cases.reduce_scatter_tensor: (0, n * r.size)}
            slot, count = slots.get(collective, (0, n))
            inputs = torch.stack([case.x(slot, count, rank=q) for q in range(r.size)]).double()
            if collective is cases.reduce_scatter_tensor:
                inputs = inputs[:, n * r.rank : n * (r.rank + 1)]
            for t in got:
                error = (t.double() - factor * inputs.sum(0)).abs()
                bound = (r.size + 1) * u * factor * inputs.abs().sum(0) + torch.finfo(dtype).tiny
                if not (error <= bound).all():
                    wrong.append(
                        f"{collective.__name__} {dtype} n={n} factor {factor}: {(error / bound).max()} of the bound"
                    )
    assert not wrong, "\n".join(wrong)


def test_premul_sum(pair, quad):
    pair(_premul)
    quad(_premul)


def _sparse(r):
    ours, gloo = _groups(r)
    for n, asynchronous in ((0, False), (3, False), (40, True)):
        results = []
        for group in (ours, gloo):
            where = torch.randperm(50, generator=torch.Generator().manual_seed(r.rank))[:n].sort().values
            t = torch.sparse_coo_tensor(where[None], values(torch.float32, n, r.rank), (50,)).coalesce()
            work = dist.all_reduce(t, group=group, async_op=asynchronous)
            if asynchronous:
                work.wait()
            results.append(t.to_dense())
        if r.size == 2:
            assert torch.equal(bits(results[0]), bits(results[1])), (n, results)
        torch.testing.assert_close(*results)


def test_sparse_all_reduce(pair, quad):
    pair(_sparse)
    quad(_sparse)


def _p2p(r):
    r.init("lowcomm")
    right, left = (r.rank + 1) % r.size, (r.rank - 1) % r.size
    for dtype in cases.FLOATS + cases.INTEGERS + cases.OTHERS:
        for n in (0, 1, 1000):
            mine, theirs = values(dtype, n, r.rank), values(dtype, n, left)
            got = torch.zeros_like(mine)
            works = [dist.irecv(got, left), dist.isend(mine, right)]
            for work in works:
                work.wait()
            assert torch.equal(bits(got), bits(theirs)), (dtype, n)
    # Blocking, one direction at a time.
    for turn in range(r.size):
        t = values(torch.float32, 333, turn)
        if r.rank == turn:
            dist.send(t, right)
        elif r.rank == (turn + 1) % r.size:
            got = torch.empty(333)
            assert dist.recv(got, turn) == turn
            assert torch.equal(got, t)
    # Tags pick the message, whatever the order of arrival; equal tags keep their order.
    sends = [dist.isend(values(torch.float32, 10, r.rank, tag), right, tag=tag) for tag in (7, 3, 5)]
    twice = [dist.isend(values(torch.float32, 10, r.rank, "twice", k), right, tag=9) for k in range(2)]
    for tag in (5, 7, 3):
        got = torch.empty(10)
        dist.recv(got, left, tag=tag)
        assert torch.equal(got, values(torch.float32, 10, left, tag)), tag
    for k in range(2):
        got = torch.empty(10)
        dist.recv(got, left, tag=9)
        assert torch.equal(got, values(torch.float32, 10, left, "twice", k)), k
    for work in sends + twice:
        work.wait()
    # From anybody.
    if r.rank == 0:
        seen = {}
        for _ in range(r.size - 1):
            got = torch.empty(64)
            seen[dist.recv(got, None, tag=1)] = got
        assert sorted(seen) == list(range(1, r.size)), sorted(seen)
        for source, got in seen.items():
            assert torch.equal(got, values(torch.float32, 64, source)), source
    else:
        dist.send(values(torch.float32, 64, r.rank), 0, tag=1)
    # Big messages both ways at once, the send first: neither may block the other.
    big = values(torch.float32, 1 << 20, r.rank)
    got = torch.empty_like(big)
    work = dist.isend(big, right)
    dist.irecv(got, left).wait()
    work.wait()
    assert torch.equal(got, values(torch.float32, 1 << 20, left))


def _batches(r):
    r.init("lowcomm")
    right, left = (r.rank + 1) % r.size, (r.rank - 1) % r.size
    for n, dtype in ((0, torch.float32), (5, torch.bfloat16), (300_007, torch.float32)):
        for receives_first in (True, False):
            for count in (1, 3):
                outs = [torch.zeros(n, dtype=dtype) for _ in range(count)]
                recvs = [dist.P2POp(dist.irecv, t, left, tag=k) for k, t in enumerate(outs)]
                sends = [dist.P2POp(dist.isend, values(dtype, n, r.rank, k), right, tag=k) for k in range(count)]
                ops = recvs + sends if receives_first else sends + recvs
                for work in dist.batch_isend_irecv(ops):
                    work.wait()
                for k, t in enumerate(outs):
                    assert torch.equal(bits(t), bits(values(dtype, n, left, k))), (n, receives_first, count, k)
    # Without tags, as pipelining does: order alone pairs them.
    outs = [torch.zeros(9) for _ in range(4)]
    ops = [dist.P2POp(dist.irecv, t, left) for t in outs]
    ops += [dist.P2POp(dist.isend, values(torch.float32, 9, r.rank, k), right) for k in range(4)]
    works = dist.batch_isend_irecv(ops)
    for work in works:
        work.wait()
    assert all(torch.equal(t, values(torch.float32, 9, left, k)) for k, t in enumerate(outs))
    # A batch of one direction only, on some ranks only.
    if r.rank == 0:
        dist.batch_isend_irecv([dist.P2POp(dist.isend, values(torch.float32, 3, 0), 1)])[0].wait()
    elif r.rank == 1:
        got = torch.empty(3)
        dist.batch_isend_irecv([dist.P2POp(dist.irecv, got, 0)])[0].wait()
        assert torch.equal(got, values(torch.float32, 3, 0))


def test_send_recv_tags_and_any_source(pair, quad):
    pair(_p2p)
    quad(_p2p)


def test_batch_isend_irecv(pair, quad):
    pair(_batches)
    quad(_batches)


def _barriers(r):
    r.init("lowcomm")
    for k in range(3):
        time.sleep(0.02 * ((r.rank + k) % r.size))
        r.say(f"in{k}.{r.rank}")
        dist.barrier()
        assert all(r.path(f"in{k}.{q}").exists() for q in range(r.size)), "left the barrier before all were in it"
    dist.barrier(async_op=True).wait()
    group = dist.group.WORLD
    group.monitored_barrier(datetime.timedelta(seconds=10))
    group.monitored_barrier(datetime.timedelta(seconds=10), wait_all_ranks=True)
    # The last rank stays away: rank 0 names it.
    if r.rank == 0:
        with pytest.raises(RuntimeError, match=f"(?i)ranks? {r.size - 1}"):
            group.monitored_barrier(datetime.timedelta(seconds=0.5), wait_all_ranks=True)
    elif r.rank < r.size - 1:
        with pytest.raises(RuntimeError):
            group.monitored_barrier(datetime.timedelta(seconds=5), wait_all_ranks=True)
    else:
        time.sleep(1)
    dist.destroy_process_group()  # here, for gloo's connections did not survive that


def test_barriers(pair, quad):
    pair(_barriers)
    quad(_barriers)


def _objects(r):
    r.init("lowcomm")
    mine = {"rank": r.rank, "text": "x" * (1000 * r.rank), "tensor": torch.arange(r.rank)}
    got = [None] * r.size
    dist.all_gather_object(got, mine)
    assert [g["rank"] for g in got] == list(range(r.size))
    assert all(torch.equal(g["tensor"], torch.arange(q)) for q, g in enumerate(got))
    items = [mine, None, 3] if r.rank == r.size - 1 else [None] * 3
    dist.broadcast_object_list(items, src=r.size - 1)
    assert items[0]["rank"] == r.size - 1
    assert items[1:] == [None, 3]
    gathered = [None] * r.size if r.rank == 0 else None
    dist.gather_object(mine["text"], gathered, dst=0)
    assert r.rank or [len(t) for t in gathered] == [1000 * q for q in range(r.size)]
    out = [None]
    dist.scatter_object_list(out, [f"for {q}" for q in range(r.size)] if r.rank == 0 else None, src=0)
    assert out == [f"for {r.rank}"]
    if r.rank == 0:
        dist.send_object_list(["a", {"b": 1}], dst=1)
    elif r.rank == 1:
        items = [None, None]
        dist.recv_object_list(items, src=0)
        assert items == ["a", {"b": 1}]


def test_object_collectives(pair, quad):
    pair(_objects)
    quad(_objects)


def _works(r):
    """A Work of every family: completes by itself, with a future, a result and no exception."""
    r.init("lowcomm")
    n = 1000
    ops = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(n), async_op=True),
        "broadcast": lambda: dist.broadcast(torch.ones(n), 0, async_op=True),
        "all_gather": lambda: dist.all_gather([torch.empty(n) for _ in range(r.size)], torch.ones(n), async_op=True),
        "all_gather_base": lambda: dist.all_gather_into_tensor(torch.empty(n * r.size), torch.ones(n), async_op=True),
        "reduce_scatter": lambda: dist.reduce_scatter(
            torch.empty(n), [torch.ones(n) for _ in range(r.size)], async_op=True
        ),
        "reduce_scatter_base": lambda: dist.reduce_scatter_tensor(
            torch.empty(n), torch.ones(n * r.size), async_op=True
        ),
        "send_recv": lambda: (
            sends.append(dist.isend(torch.ones(n), (r.rank + 1) % r.size))
            or dist.irecv(torch.empty(n), (r.rank - 1) % r.size)
        ),
    }
    sends = []
    for name, issue in ops.items():
        work = issue()
        deadline = time.monotonic() + 20
        while name != "send_recv" and not work.is_completed():  # gloo's p2p Works need their wait()
            assert time.monotonic() < deadline, f"{name} does not complete without wait()"
            time.sleep(0.001)
        assert work.wait() is not False, name
        assert work.exception() is None, name
        assert work.is_success(), name
        if name.endswith("base") or name.startswith(("reduce_scatter", "all_gather", "send_recv")):
            future = issue().get_future()
            got = future.then(lambda f: [t.clone() for t in f.value()]).wait()
            assert all(isinstance(t, torch.Tensor) for t in got) and got, name
            if name.startswith("reduce_scatter"):
                assert torch.equal(got[0], torch.full((n,), float(r.size))), name
    out = torch.empty(n)
    work = dist.reduce_scatter_tensor(out, torch.ones(n * r.size), async_op=True)
    work.wait()
    assert [t.data_ptr() for t in work.result()] == [out.data_ptr()]


def _late(r, which):
    """A wait of its own time-out fails on the rank that is early; the op itself goes on and comes out right."""
    r.init("lowcomm")
    out = torch.empty(10 * r.size)
    dist.all_gather_into_tensor(out, torch.ones(10))
    issue = {
        "all_gather": lambda: dist.all_gather_into_tensor(out, torch.full((10,), float(r.rank)), async_op=True),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(out[:10], torch.ones(10 * r.size), async_op=True),
    }[which]
    if r.rank == 0:
        work = issue()
        assert not work.is_completed()
        with pytest.raises(RuntimeError):
            work.wait(datetime.timedelta(milliseconds=50))
        r.say("waited")
        work.wait()
    else:
        r.hear("waited")
        issue().wait()
    want = (
        torch.arange(r.size).repeat_interleave(10).float()
        if which == "all_gather"
        else torch.full((10,), float(r.size))
    )
    assert torch.equal(out[: want.numel()], want)


def _first_op(r):
    """The first op of a group returns at once, as every other: nobody need wait for his peers to issue theirs."""
    r.init("lowcomm", timeout_s=15)
    group = dist.new_group(timeout=datetime.timedelta(seconds=15))
    for world in (None, group):
        out = torch.empty(3 * r.size)
        mine = torch.full((3,), float(r.rank))
        token = torch.zeros(1)
        if r.rank == 0:
            work = dist.all_gather_into_tensor(out, mine, group=world, async_op=True)
            dist.send(token, 1, group=world)
        else:
            dist.recv(token, 0, group=world)
            work = dist.all_gather_into_tensor(out, mine, group=world, async_op=True)
        work.wait()
        assert torch.equal(out, torch.arange(r.size).repeat_interleave(3).float())


def test_the_first_op_does_not_block(pair):
    pair(_first_op)


def _sequence(r):
    """One more for each collective, the same on every rank, and none for a send."""
    r.init("lowcomm")
    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    start = group._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(3))
    dist.all_gather_into_tensor(torch.empty(3 * r.size), torch.ones(3))
    dist.reduce_scatter_tensor(torch.empty(3), torch.ones(3 * r.size))
    dist.reduce_scatter(torch.empty(3), [torch.ones(3)] * r.size)
    dist.broadcast(torch.ones(3), 0)
    dist.all_to_all_single(torch.empty(r.size), torch.ones(r.size))
    assert group._get_sequence_number_for_group() - start == 6
    seen = [None] * r.size
    dist.all_gather_object(seen, start)
    return seen


def test_works(pair, quad):
    pair(_works)
    quad(_works)


@pytest.mark.parametrize("which", ["all_gather", "reduce_scatter"])
def test_a_wait_that_times_out_leaves_the_op_alone(pair, which):
    pair(_late, which)


def test_sequence_numbers(pair):
    seen = pair(_sequence)
    assert seen[0] == seen[1] == [seen[0][0]] * 2


def _profiled(r):
    """The profiler sees each of lowcomm's own ops once, from issue to completion."""
    r.init("lowcomm")
    out, mine = torch.empty(40 * r.size), torch.empty(40)
    for asynchronous in (False, True):
        with torch.autograd.profiler.profile(record_shapes=True) as profile:
            works = [
                dist.all_gather_into_tensor(out, torch.ones(40), async_op=asynchronous),
                dist.reduce_scatter_tensor(mine, out, async_op=asynchronous),
            ]
            if asynchronous:
                for work in works:
                    work.wait()
        for title, shape in (("lowcomm:all_gather", [40]), ("lowcomm:reduce_scatter", [40 * r.size])):
            events = [e for e in profile.function_events if e.name.startswith(title)]
            assert len(events) == 1, f"{title}: {[e.name for e in profile.function_events]}"
            assert events[0].is_async
            assert events[0].input_shapes[0] == shape, events[0].input_shapes


def test_the_profiler_sees_own_ops(pair):
    pair(_profiled)


def _many_at_once(r):
    """Ops of all kinds in flight together, waited for in another order."""
    r.init("lowcomm")
    works, checks = [], []
    for k in range(30):
        full = values(torch.float32, 50 * r.size, r.rank, k)
        out, whole = torch.empty(50), torch.empty(50 * r.size)
        total = full.clone()
        works.append(dist.reduce_scatter_tensor(out, full, async_op=True))
        works.append(dist.all_reduce(total, async_op=True))
        works.append(dist.all_gather_into_tensor(whole, full[:50].clone(), async_op=True))
        checks.append((k, out, total, whole))
    dist.barrier()
    for work in reversed(works):
        work.wait()
    for k, out, total, whole in checks:
        inputs = [values(torch.float32, 50 * r.size, q, k) for q in range(r.size)]
        want = inputs[0].clone()
        for x in inputs[1:]:
            want += x
        assert torch.equal(out, want[50 * r.rank : 50 * (r.rank + 1)]), k
        torch.testing.assert_close(total, want)
        assert torch.equal(whole, torch.cat([x[:50] for x in inputs])), k


def _coalescing_device(r):
    """The manager with a device starts and ends coalescing in the backend; collectives and p2p may mix in it."""
    r.init("lowcomm")
    right, left = (r.rank + 1) % r.size, (r.rank - 1) % r.size
    outs = torch.empty(4 * r.size), torch.empty(4), torch.empty(4)
    with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.isend(torch.full((4,), float(r.rank)), right)
        dist.irecv(outs[2], left)
    manager.wait()
    assert torch.equal(outs[2], torch.full((4,), float(left)))
    with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu")):
        dist.all_gather_into_tensor(outs[0], torch.full((4,), float(r.rank)))
    assert torch.equal(outs[0], torch.arange(r.size).repeat_interleave(4).float())
    with dist.distributed_c10d._coalescing_manager():
        pass  # nothing in it
    dist.all_reduce(outs[1].fill_(1))
    assert torch.equal(outs[1], torch.full((4,), float(r.size)))


def test_many_ops_in_flight(pair, quad):
    pair(_many_at_once)
    quad(_many_at_once)


def test_coalescing_with_a_device(pair, quad):
    pair(_coalescing_device)
    quad(_coalescing_device)


def _functional_autograd(r):
    ours, gloo = _groups(r)
    results = []
    for group in (ours, gloo):
        x = values(torch.float32, 6 * r.size, r.rank).requires_grad_()
        y = fcol.all_gather_tensor_autograd(x, 0, group)
        z = fcol.reduce_scatter_tensor_autograd(y * y, "sum", 0, group)
        z.sum().backward()
        results.append((z.detach(), x.grad))
    for a, b in zip(*results, strict=True):
        assert r.size > 2 or torch.equal(bits(a), bits(b))
        torch.testing.assert_close(a, b)


def test_functional_collectives_with_gradients(pair, quad):
    pair(_functional_autograd)
    quad(_functional_autograd)
