"""Ranks that differ in version, options, policy or call: each names the field, both values and both ranks, nothing is done."""

import re
import threading
from datetime import timedelta

import pytest
import ranks
import torch
import torch.distributed as dist
from group_check import check_group


def _differ_at_creation(r, field):
    import torch_lowcomm as lc

    odd = r.rank == r.size - 1
    values = {
        "policy": ("all_gather=minmax8:bucket=1024", "all_gather=minmax4:bucket=1024"),
        "min_bytes": (1, 2),
        "seed": (1, 2),
        "chunk_bytes": (65536, 131072),
    }[field]
    with pytest.raises(dist.DistBackendError) as failure:
        r.init("lowcomm", timeout_s=20, pg_options=lc.Options(**{field: values[odd]}))
    message = str(failure.value)
    assert field in message, message
    assert str(values[0]) in message, message
    assert str(values[1]) in message, message
    assert f"rank {r.size - 1}" in message, message
    assert not dist.is_initialized()
    r.init("lowcomm")
    check_group(r)


@pytest.mark.parametrize("field", ["policy", "min_bytes", "seed", "chunk_bytes"])
def test_options_that_differ_between_ranks(quad, field):
    quad(_differ_at_creation, field)


def _one_rank_is_wrong_at_creation(r):
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


def test_a_wrong_option_on_one_rank_reaches_the_others(quad):
    quad(_one_rank_is_wrong_at_creation)


def _other_version(r):
    """Another wire version or package on the last rank: found when the group is made."""
    from torch_lowcomm import _C

    spoilt = f"{r.folder}/spoilt"
    store = dist.FileStore(spoilt, r.size)
    if r.rank == r.size - 1:
        # Says hello as a later build would, and goes.
        hello = r.hear("hello").replace(f"={_C.WIRE_VERSION}\n", f"={_C.WIRE_VERSION + 1}\n", 1)
        dist.PrefixStore("g", store).set(f"lowcomm/hello/{r.rank}", hello)
        r.hear("heard")
        return None

    def watch():
        watched = dist.PrefixStore("g", dist.FileStore(spoilt, r.size))
        r.say("hello", watched.get("lowcomm/hello/0").decode())

    watcher = threading.Thread(target=watch)
    watcher.start()
    with pytest.raises(dist.DistBackendError) as failure:
        from torch_lowcomm._create import make_inner

        _C.create_backend(
            dist.PrefixStore("g", store), r.rank, r.size, _C.Options(), timedelta(seconds=20), "g", [0, 1], make_inner
        )
    watcher.join()
    r.say("heard")
    return str(failure.value)


def test_another_wire_version(pair):
    message = pair(_other_version)[0]
    for part in ("version", "rank 0", "rank 1"):
        assert part in message, message


def _differing_policy_set(r):
    """set_policy on a living group: differing texts are named on every rank, and nothing changes."""
    import torch_lowcomm as lc

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


def test_set_policy_that_differs(pair, quad):
    pair(_differing_policy_set)
    quad(_differing_policy_set)


MISMATCHES = {
    "shape": "elements",
    "dtype": "dtype",
    "op": "op",
    "count": "tensors|elements",
    "reduce op": "reduce op|codec",  # a maximum is exact, so under a policy the codec differs too
    "exact scope": "codec",
}


def _mismatch(r, op, what, policy):
    """The last rank calls the op with another shape, dtype, …: every rank hears expected and actual."""
    import contextlib

    import torch_lowcomm as lc

    r.init("lowcomm", timeout_s=20, pg_options=lc.Options(policy=policy, min_bytes=0))
    odd = r.rank == r.size - 1
    n = 700 if what == "shape" and odd else 600
    dtype = torch.bfloat16 if what == "dtype" and odd else torch.float32
    kind = ({"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}[op]) if what == "op" and odd else op
    scope = lc.exact() if what == "exact scope" and odd else contextlib.nullcontext()
    reduce_op = dist.ReduceOp.MAX if what == "reduce op" and odd else dist.ReduceOp.SUM
    with pytest.raises(dist.DistBackendError) as failure, scope:
        if what == "count":
            tensors = [torch.ones(n) for _ in range(2 + odd)]
            with dist.distributed_c10d._coalescing_manager():
                for t in tensors:
                    if kind == "all_gather":
                        dist.all_gather_into_tensor(torch.empty(n * r.size), t)
                    else:
                        dist.reduce_scatter_tensor(t, torch.ones(n * r.size))
        elif kind == "all_gather":
            dist.all_gather_into_tensor(torch.empty(n * r.size, dtype=dtype), torch.ones(n, dtype=dtype))
        else:
            out = torch.empty(n, dtype=dtype)
            dist.reduce_scatter_tensor(out, torch.ones(n * r.size, dtype=dtype), op=reduce_op)
    message = str(failure.value)
    assert re.search(MISMATCHES[what], message), message
    assert f"rank {r.size - 1}" in message or r.rank not in (0, r.size - 1), message
    if what == "shape":
        assert re.search(r"\b600\b", message), message
        assert re.search(r"\b700\b", message), message
    return message


@pytest.mark.parametrize("policy", ["", "all_gather=minmax8; reduce_scatter=qsgd8"], ids=["exact", "compressed"])
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_calls_that_differ_between_ranks(op, policy):
    for what in MISMATCHES:
        if (what == "reduce op" and op == "all_gather") or (what == "exact scope" and not policy):
            continue
        ranks.run_ranks(_mismatch, 3 if what == "shape" else 2, op, what, policy)
