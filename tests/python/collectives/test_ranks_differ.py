"""Ranks that differ in version, options or policy: each names the field, both values and both ranks, nothing is done."""

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
