"""Without a policy every collective gives gloo's bits: lowcomm and gloo side by side in the same processes.

At two ranks each result is bit-equal. At more it is where no floating sum depends on the order; else it is within the bound
of such sums, 2*(W-1)*u*sum|x_i|, u the dtype's unit (AllReduceExact in tests/cpp has the bits, which every rank has).
"""

import itertools

import collective_cases as cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fcol
from collective_cases import Case, attempt, bits, values

import torch_lowcomm as lc

SUM, AVG, MIN, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX
PRODUCT, BAND, BOR, BXOR = dist.ReduceOp.PRODUCT, dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR
OWN = ("all_gather", "reduce_scatter")  # lowcomm's own exchange
LARGE = 140_003  # more frames than are under way at a time, at two bytes an element too
REDUCE_OPS = (SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR)


def _groups(r):
    """lowcomm as the world, gloo next to it."""
    r.init("lowcomm", timeout_s=20, pg_options=lc.Options(chunk_bytes=65536))
    return dist.group.WORLD, dist.new_group(backend="gloo")


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
        want = attempt(collective, Case(self.gloo, **{**where, "layout": "dense"}))
        if isinstance(want, Exception):
            self.refused.add((name, str(fields.get("dtype")), str(fields.get("op"))))
            want = cases.BY_HAND[collective](Case(None, **where)) if collective in cases.BY_HAND else None
        got = attempt(collective, Case(self.ours, **where))
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
        exact, dtype = self._exact(collective, fields), fields.get("dtype", torch.float32)
        for k, (g, w) in enumerate(zip(got, want, strict=True)):
            if g.shape != w.shape or g.dtype != w.dtype:
                self.wrong.append(f"{label}: tensor {k} is {g.dtype}{list(g.shape)}, gloo's {w.dtype}{list(w.shape)}")
            elif exact and not torch.equal(bits(g), bits(w)):
                g, w = g.reshape(-1), w.reshape(-1)
                at = (g != w).nonzero().flatten()[:3].tolist()
                self.wrong.append(f"{label}: tensor {k} differs from gloo's at {at}: {g[at]} for {w[at]}")
            elif not exact and dtype in cases.UNIT and fields.get("op") != PRODUCT:
                bound = 2 * 400 * self.r.size**2 * cases.UNIT[dtype]  # no value is above 400
                if not torch.allclose(g.double(), w.double(), rtol=0, atol=bound):
                    self.wrong.append(f"{label}: tensor {k} is further than {bound} from gloo's")

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
        for dtype, n in itertools.product((torch.float32, torch.bfloat16), (0, 1000, LARGE)):
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
            (torch.float32, torch.float16, torch.bfloat16, torch.float64), (0, 1000, LARGE)
        ):
            sweep.check(collective, dtype=dtype, op=SUM, n=n, asynchronous=True)
        if collective is cases.reduce:
            for root, asynchronous in itertools.product(range(r.size), (False, True)):
                sweep.check(collective, n=17, root=root, asynchronous=asynchronous)
    for collective, op, n in itertools.product(cases.FUNCTIONAL_REDUCING, (SUM, AVG, MAX), (0, 5, 1000)):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            sweep.check(collective, dtype=dtype, op=op, n=n)
    return sweep.end()


@pytest.mark.later
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("sweep", [_plain, _reducing], ids=["plain", "reducing"])
def test_every_collective_gives_gloos_bits(request, sweep, size):
    ranks = request.getfixturevalue({2: "pair", 3: "trio", 4: "quad"}[size])
    compared, refused = ranks(sweep, timeout=180)[0]
    names = cases.PLAIN if sweep is _plain else cases.REDUCING + cases.FUNCTIONAL_REDUCING
    missing = [c.__name__ for c in names if not compared.get(c.__name__)]
    assert not missing, f"compared nothing for {missing}; gloo refuses {sorted(refused)[:10]}"


@pytest.mark.on("pair", "quad")
def test_functional_collectives_with_gradients(r):
    ours, gloo = _groups(r)
    results = []
    for group in (ours, gloo):
        x = values(torch.float32, 6 * r.size, r.rank).requires_grad_()
        y = fcol.all_gather_tensor_autograd(x, 0, group)
        z = fcol.reduce_scatter_tensor_autograd(y * y, "sum", 0, group)
        z.backward(torch.ones_like(z))  # torch 2.11 refuses the strided gradient of a sum
        results.append((z.detach(), x.grad))
    for a, b in zip(*results, strict=True):
        assert r.size > 2 or torch.equal(bits(a), bits(b))
        torch.testing.assert_close(a, b)
