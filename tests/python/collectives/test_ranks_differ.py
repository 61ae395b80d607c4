"""Ranks that differ in version, options, policy or call: each names the field, both values and both ranks, nothing is done."""

import contextlib
import re
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from group_check import check_group

import torch_lowcomm as lc


@pytest.mark.parametrize("field", ["policy", "min_bytes", "seed", "chunk_bytes", "connections"])
@pytest.mark.on("quad")
def test_options_that_differ_between_ranks(r, field):
    odd = r.rank == r.size - 1
    values = {
        "policy": ("all_gather=minmax8:bucket=1024", "all_gather=minmax4:bucket=1024"),
        "min_bytes": (1, 2),
        "seed": (1, 2),
        "chunk_bytes": (65536, 131072),
        "connections": (1, 2),
    }[field]
    with pytest.raises(dist.DistBackendError) as failure:
        r.init("lowcomm", timeout_s=20, pg_options=lc.Options(**{field: values[odd]}))
    message = str(failure.value)
    assert field in message, message
    for value in values:
        assert str(value) in message, message
    assert f"rank {r.size - 1}" in message, message
    assert not dist.is_initialized()
    r.init("lowcomm")
    check_group(r)


@pytest.mark.on("quad")
def test_a_wrong_option_on_one_rank_reaches_the_others(r):
    """One rank's options do not parse: it gets ValueError, the others learn why."""
    import os

    if r.rank == 0:
        os.environ["LOWCOMM_POLICY"] = "all_gather=foo8"
        with pytest.raises(ValueError, match="foo8"):
            r.init("lowcomm", timeout_s=20)
        del os.environ["LOWCOMM_POLICY"]
    else:
        with pytest.raises(dist.DistBackendError, match=r"(?s)rank 0.*foo8"):
            r.init("lowcomm", timeout_s=20)
    r.init("lowcomm")
    check_group(r)


@pytest.mark.on("trio")
def test_another_wire_version(r):
    """Another wire version or package on the last rank: found when the group is made."""
    from torch_lowcomm import _C

    spoilt = f"{r.folder}/spoilt"
    store = dist.FileStore(spoilt, r.size)
    if r.rank == r.size - 1:
        # Says hello as a later build would.
        hello = r.hear("hello").replace(f"={_C.WIRE_VERSION}\n", f"={_C.WIRE_VERSION + 1}\n", 1)
        dist.PrefixStore("g", store).set(f"lowcomm/hello/{r.rank}", hello)
        for q in range(r.size - 1):
            r.hear(f"heard{q}")
        return

    def watch():
        watched = dist.PrefixStore("g", dist.FileStore(spoilt, r.size))
        r.say("hello", watched.get("lowcomm/hello/0").decode())

    watcher = threading.Thread(target=watch)
    if r.rank == 0:
        watcher.start()
    with pytest.raises(dist.DistBackendError) as failure:
        from torch_lowcomm._create import make_nccl

        members = list(range(r.size))
        options, timeout = _C.Options(), timedelta(seconds=20)
        store = dist.PrefixStore("g", store)
        _C.create_backend(store, r.rank, r.size, options, timeout, "g", members, make_nccl)
    if r.rank == 0:
        watcher.join()
    r.say(f"heard{r.rank}")
    ours, theirs = _C.WIRE_VERSION, _C.WIRE_VERSION + 1
    told = f"version differs: rank {r.rank} has '{ours}', rank {r.size - 1} has '{theirs}'"
    assert told in str(failure.value), failure.value


@pytest.mark.on("pair", "quad")
def test_set_policy_that_differs(r):
    """set_policy on a living group: differing texts are named on every rank, and nothing changes."""
    r.init("lowcomm", pg_options=lc.Options(min_bytes=0))
    lc.set_policy(None, "all_gather=minmax8")
    odd = r.rank == r.size - 1
    with pytest.raises(dist.DistBackendError) as failure:
        lc.set_policy(None, "all_gather=minmax2" if odd else "all_gather=minmax4")
    for part in ("policy", "minmax2", "minmax4", f"rank {r.size - 1}"):
        assert part in str(failure.value), failure.value
    with pytest.raises(dist.DistBackendError if not odd else ValueError) as failure:
        lc.set_policy(None, "all_gather=foo8" if odd else "all_gather=minmax4")
    assert "foo8" in str(failure.value), failure.value
    # Still minmax8.
    x = torch.randn(3000, generator=torch.Generator().manual_seed(r.rank))
    out = torch.empty(3000 * r.size)
    dist.all_gather_into_tensor(out, x)
    assert torch.equal(out[3000 * r.rank : 3000 * (r.rank + 1)], lc.codec("minmax8").roundtrip(x))
    lc.set_policy(None, "")
    dist.all_gather_into_tensor(out, x)
    assert torch.equal(out[3000 * r.rank : 3000 * (r.rank + 1)], x)


CODEC = {"all_gather": "minmax8:bucket=1024", "reduce_scatter": "qsgd8:bucket=1024"}
# The last rank's difference -> the field that differs, what the others have and what it has. `{op}` is the op
# that was meant, `{other}` the other one, `{codec}` the codec of the op.
MISMATCHES = {
    "shape": ("elements a rank", "600", "700"),
    "dtype": ("dtype", "float32", "bfloat16"),
    "opaque dtype": ("dtype", "UInt16", "Float8_e4m3fn"),  # the wire carries both as bytes
    "op": ("op", "{op}", "{other}"),
    "count": ("tensors", "2", "3"),
    "reduce op": ("reduce op", "sum", "max"),
    "exact scope": ("codec", "{codec}", "none"),
}


def _call(kind, what, odd, size):
    """One call of the op `kind`, on the odd rank another one than on the others; returns what it may write to."""
    n = 700 if what == "shape" and odd else 600
    dtype = torch.bfloat16 if what == "dtype" and odd else torch.float32
    if what == "opaque dtype":
        n, dtype = (1200, torch.float8_e4m3fn) if odd else (600, torch.uint16)  # as many bytes
    gathers = kind == "all_gather"
    outs = [torch.full((n * size if gathers else n,), 7.0).to(dtype) for _ in range(2 + odd if what == "count" else 1)]
    mine = torch.ones(n if gathers else n * size).to(dtype)
    reduce_op = dist.ReduceOp.MAX if what == "reduce op" and odd else dist.ReduceOp.SUM

    def issue():
        coalescing = dist.distributed_c10d._coalescing_manager() if what == "count" else contextlib.nullcontext()
        with coalescing:
            for out in outs:
                if gathers:
                    dist.all_gather_into_tensor(out, mine)
                else:
                    dist.reduce_scatter_tensor(out, mine, op=reduce_op)

    return issue, outs


def _differences():
    for what in MISMATCHES:
        for op in {"reduce op": ("reduce_scatter",), "opaque dtype": ("all_gather",)}.get(what, CODEC):
            for kind in {"exact scope": ("compressed",), "opaque dtype": ("exact",)}.get(what, ("exact", "compressed")):
                yield pytest.param(what, op, kind, id=f"{what}-{op}-{kind}")


@pytest.mark.parametrize(("what", "op", "kind"), list(_differences()))
@pytest.mark.on("trio")
def test_calls_that_differ_between_ranks(r, what, op, kind):
    """The last rank makes another call: every rank hears which field differs, both values, and whose they are."""
    policy = "" if kind == "exact" else "all_gather=minmax8; reduce_scatter=qsgd8"
    r.init("lowcomm", timeout_s=20, pg_options=lc.Options(policy=policy, min_bytes=0))
    culprit = r.size - 1
    odd = r.rank == culprit
    other = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}[op]
    issue, outs = _call(other if what == "op" and odd else op, what, odd, r.size)
    scope = lc.exact() if what == "exact scope" and odd else contextlib.nullcontext()
    with pytest.raises(dist.DistBackendError) as failure, scope:
        issue()
    field, usual, unusual = (part.format(op=op, other=other, codec=CODEC[op]) for part in MISMATCHES[what])
    message = str(failure.value)
    told = re.search(rf"{field} differs: rank (\d+) has '([^']*)', rank (\d+) has '([^']*)'", message)
    assert told, message
    values = {int(told[1]): told[2], int(told[3]): told[4]}
    assert values.pop(culprit) == unusual, message
    assert list(values.values()) == [usual], message
    assert all((out.float() == 7).all() for out in outs), "descriptions are compared before anything is taken"
    check_group(r)
