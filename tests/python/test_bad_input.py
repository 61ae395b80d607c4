"""What must not work: each mistake is a named error with expected and actual, on every live rank, and nothing half done.

A caller's mistake is ValueError or TypeError before anything is sent; what a peer did is DistBackendError; a rank whose
data holds a NaN gets ValueError and the others an error that names it. After a mistake that was seen in time the group
still works.
"""

import re
import struct
import threading
from datetime import timedelta

import pytest
import ranks
import torch
import torch.distributed as dist

# text of a policy -> what the message must name
BAD_POLICIES = {
    "all_gather=foo8": "foo8",
    "all_gather=minmax": "minmax",
    "all_gather=minmax0": "bits.*1.*8.*0",
    "all_gather=minmax9": "bits.*1.*8.*9",
    "all_gather=qsgd16": "bits.*1.*8.*16",
    "all_gather=minmax8:speed=3": "speed",
    "all_gather=minmax8:bucket": "bucket",
    "all_gather=minmax8:bucket=": "bucket",
    "all_gather=minmax8:bucket=1000": "power of two.*1000",
    "all_gather=minmax8:bucket=32": "64.*65536.*32",
    "all_gather=minmax8:bucket=131072": "64.*65536.*131072",
    "all_gather=minmax8:bucket=-64": "bucket.*-64",
    "all_gather=minmax8:bucket=many": "bucket.*many",
    "all_gather=minmax8:bucket=128,bucket=128": "bucket",
    "all_gather=minmax8:meta=bf16": "meta",
    "all_gather=minmax8:rotate=1": "rotate",
    "all_gather=minmax8:nonfinite=saturate": "nonfinite",
    "all_gather=sym4": "sym4",
    "all_gather=topk:keep=0.2": "topk",
    "all_gathr=minmax8": "all_gathr.*all_gather",
    "all_reduce=qsgd8": "all_reduce",
    "all_gather": "op=codec.*all_gather",
    "all_gather=minmax8; all_gather=minmax4": "all_gather.*twice",
    "all_gather=minmax8; reduce_scatter=none:bucket=64": "bucket",
}
BAD_NUMBERS = {"min_bytes": -1, "seed": -1, "chunk_bytes": 1000}


def _refused(r):
    import os

    import torch_lowcomm as lc

    for text, named in BAD_POLICIES.items():
        with pytest.raises(ValueError, match=f"(?s){named}"):
            lc.Options(policy=text)
        with pytest.raises(ValueError, match=f"(?s){named}"):
            lc.codec(text.split("=", 1)[1]) if re.match("all_gather=[^;]*$", text) else lc.Options(policy=text)
    for field, value in BAD_NUMBERS.items():
        with pytest.raises(ValueError, match=f"{field}.*{value}"):
            lc.Options(**{field: value})
    r.init("lowcomm")
    for text, named in BAD_POLICIES.items():
        with pytest.raises(ValueError, match=f"(?s){named}"):
            lc.set_policy(None, text)
    _still_works(r)
    dist.destroy_process_group()
    for variable, value in [
        ("LOWCOMM_POLICY", "all_gather=foo8"),
        ("LOWCOMM_MIN_BYTES", "few"),
        ("LOWCOMM_SEED", "-3"),
    ]:
        os.environ[variable] = value
        with pytest.raises(ValueError, match=f"{variable}.*{value.split('=')[-1]}"):
            r.init("lowcomm")
        del os.environ[variable]
    assert not dist.is_initialized()
    r.init("lowcomm")
    _still_works(r)


def _still_works(r, group=None):
    out = torch.empty(3 * r.size)
    dist.all_gather_into_tensor(out, torch.full((3,), float(r.rank)), group=group)
    assert torch.equal(out, torch.arange(r.size).repeat_interleave(3).float())
    mine = torch.empty(2)
    dist.reduce_scatter_tensor(mine, torch.ones(2 * r.size), group=group)
    assert mine.tolist() == [r.size] * 2


def test_bad_options_policies_and_environment(pair):
    pair(_refused)


def _wrong_types(r):
    import torch_lowcomm as lc

    c = lc.codec("minmax8")
    for x in (torch.ones(5, dtype=torch.float64), torch.ones(5, dtype=torch.int32), torch.ones(5, dtype=torch.bool)):
        for call in (c.encode, c.roundtrip):
            with pytest.raises((ValueError, TypeError), match=r"(?i)float32.*(float64|double|int|bool|opaque)"):
                call(x)
    payload = c.encode(torch.randn(5000))
    with pytest.raises((ValueError, dist.DistBackendError), match=r"\d+"):
        c.decode(payload, 4000)
    with pytest.raises((ValueError, dist.DistBackendError), match=r"\d+"):
        c.decode(payload[:-64], 5000)
    with pytest.raises((ValueError, TypeError)):
        c.decode(payload.float(), 5000)
    r.init("lowcomm")
    # Sizes and dtypes that do not fit within one rank: nothing is sent.
    bad = [
        lambda: dist.all_gather_into_tensor(torch.empty(5), torch.ones(3)),
        lambda: dist.all_gather([torch.empty(3)] * (r.size - 1), torch.ones(3)),
        lambda: dist.all_gather([torch.empty(4)] * r.size, torch.ones(3)),
        lambda: dist.reduce_scatter_tensor(torch.empty(3), torch.ones(3 * r.size + 1)),
        lambda: dist.reduce_scatter(torch.empty(3), [torch.ones(4)] * r.size),
        lambda: dist.reduce_scatter(torch.empty(3), [torch.ones(3)] * (r.size + 1)),
    ]
    for k, call in enumerate(bad):
        with pytest.raises((ValueError, RuntimeError), match=r"(?is)expected.*got|\d") as failure:
            call()
        assert not isinstance(failure.value, dist.DistBackendError), (k, failure.value)
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        dist.all_gather_into_tensor(torch.empty(3 * r.size, dtype=torch.float64), torch.ones(3))
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        dist.reduce_scatter_tensor(torch.empty(3), torch.ones(3 * r.size, dtype=torch.bfloat16))
    _still_works(r)


def test_wrong_types_and_sizes_within_a_rank(pair):
    pair(_wrong_types)


# ---- ranks that differ -----------------------------------------------------------------------------------------------


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
    _still_works(r)


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
    _still_works(r)


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


# ---- NaN and infinity ------------------------------------------------------------------------------------------------


def _not_finite(r, op, value, at, form):
    import torch_lowcomm as lc

    policy = "all_gather=minmax8:bucket=1024; reduce_scatter=qsgd4:bucket=512"
    r.init("lowcomm", timeout_s=20, pg_options=lc.Options(policy=policy, min_bytes=0, chunk_bytes=65536))
    n = 200_000
    culprit = r.size - 1
    for _ in range(2):  # twice: the group goes on
        x = torch.randn(n * r.size if op == "reduce_scatter" else n)
        if r.rank == culprit:
            x[at] = value
        out = torch.empty(n * r.size if op == "all_gather" else n)

        def call(x=x, out=out):
            if op == "all_gather" and form == "list":
                return dist.all_gather(list(out.chunk(r.size)), x, async_op=True)
            if op == "all_gather":
                return dist.all_gather_into_tensor(out, x, async_op=True)
            if form == "list":
                return dist.reduce_scatter(out, list(x.chunk(r.size)), async_op=True)
            return dist.reduce_scatter_tensor(out, x, async_op=True)

        if r.rank == culprit:
            with pytest.raises(
                ValueError, match=rf"(?is)(nan|non-?finite|finite|inf).*{at % n}|{at % n}.*finite"
            ) as failure:
                call().wait()
            assert not isinstance(failure.value, dist.DistBackendError)
        else:
            with pytest.raises(dist.DistBackendError, match=rf"(?s){op}.*rank {culprit}\b|rank {culprit}\b.*{op}"):
                call().wait()
        dist.barrier()
        _still_works(r)
        # Exact on request, NaN and all.
        with lc.exact():
            call().wait()
        if op == "all_gather":
            assert not torch.isfinite(out[culprit * n + at]), "an exact op must carry what it is given"
        # And clean data goes through.
        x[at % x.numel()] = 0.0
        call().wait()
        assert torch.isfinite(out).all()


@pytest.mark.parametrize(
    ("op", "value", "at", "form"),
    [
        ("all_gather", float("nan"), 0, "base"),
        ("all_gather", float("inf"), 123_456, "base"),
        ("all_gather", float("-inf"), 199_999, "list"),
        ("reduce_scatter", float("nan"), 0, "base"),
        ("reduce_scatter", float("nan"), 1_234, "list"),
        ("reduce_scatter", float("inf"), 199_999, "base"),
    ],
)
def test_not_finite(pair, quad, op, value, at, form):
    pair(_not_finite, op, value, at, form)
    if form == "base":
        quad(_not_finite, op, value, at, form)


# ---- frames that are not what the format says ------------------------------------------------------------------------

HEADER = 64
SIZE_AT = 56  # of the payload's size in the header
FRAME_ROOM = 4 << 20


def _flip(frame, byte, mask=0x10):
    frame = frame.clone()
    frame[byte] ^= mask
    return frame


# What the last rank does to the data frame it sends; what the others' message must speak of.
CORRUPTIONS = {
    "payload bit": (lambda f: _flip(f, HEADER + 777), "(?i)crc"),
    "last payload bit": (lambda f: _flip(f, f.numel() - 1, 0x80), "(?i)crc"),
    "header bit": (lambda f: _flip(f, 16), "(?i)crc|elements"),
    "magic": (lambda f: _flip(f, 0), "(?i)magic|LCMF"),
    "version": (lambda f: _flip(f, 4), "(?i)version"),
    "kind": (lambda f: _flip(f, 5), "(?i)kind|crc"),
    "codec": (lambda f: _flip(f, 6), "(?i)codec|crc"),
    "payload size": (lambda f: _flip(f, SIZE_AT), "(?i)payload|size|bytes"),
    "huge payload size": (lambda f: _flip(f, SIZE_AT + 3, 0x7F), "(?i)payload|size|bytes"),
    "truncated payload": (lambda f: f[:-100], "(?i)payload|crc|size|bytes"),
    "truncated header": (lambda f: f[:30], "(?i)header|magic|crc|bytes|LCMF|payload"),
    "zeros": (lambda f: torch.zeros_like(f), "(?i)magic|LCMF"),
    "noise": (lambda f: torch.randint(0, 256, (f.numel(),), dtype=torch.uint8), "(?i)magic|LCMF"),
}


def _echo(r, name, policy):
    """The last rank answers by hand: it sends rank 0's own frames back (they name no sender), one of them spoilt."""
    import torch_lowcomm as lc
    from torch_lowcomm import _create

    lanes = {}
    make = _create.make_inner

    def record(role, store, *args):
        made = make(role, store, *args)
        if role == "lane":
            store.set(f"lane{len(lanes)}", "")
            bulk = store.underlying_store.check([f"lowcomm/lane/bulk/lane{len(lanes)}"])
            lanes["bulk" if bulk else "control"] = made
        return made

    _create.make_inner = record
    try:
        r.init("lowcomm", timeout_s=20, pg_options=lc.Options(policy=policy, min_bytes=0))
        _still_works(r)
    finally:
        _create.make_inner = make
    n = 20_000
    if r.rank == 1:
        bulk = lanes["bulk"]
        frames = []
        for k in range(1 if name == "description" else 2):  # the op's description, then its one data frame
            buffer = torch.zeros(FRAME_ROOM, dtype=torch.uint8)
            bulk.recv([buffer], 0, 0).wait()
            (size,) = struct.unpack_from("<I", bytes(buffer[SIZE_AT : SIZE_AT + 4].tolist()))
            frames.append(buffer[: HEADER + size].clone())
            spoil = name == "description" or k == 1
            out = frames[-1]
            if spoil:
                out = _flip(out, HEADER) if name == "description" else CORRUPTIONS[name][0](out)
            bulk.send([out.contiguous()], 0, 0).wait()
        r.hear("heard", 30)
        return None
    out = torch.full((2 * n,), 7.0)
    with pytest.raises(dist.DistBackendError) as failure:
        dist.all_gather_into_tensor(out, torch.randn(n, generator=torch.Generator().manual_seed(0)))
    message = str(failure.value)
    assert re.search("(?i)crc" if name == "description" else CORRUPTIONS[name][1], message), message
    for part in ("all_gather", "rank 1", "sequence", "group"):
        assert part in message, message
    with pytest.raises(dist.DistBackendError):  # the connection's order is lost, so the group is over
        dist.all_gather_into_tensor(out, torch.randn(n))
    r.say("heard")
    return message


@pytest.mark.parametrize("policy", ["", "all_gather=minmax8:bucket=64"], ids=["exact", "compressed"])
def test_spoilt_frames(policy):
    for name in ("description", *CORRUPTIONS):
        ranks.run_ranks(_echo, 2, name, policy)
