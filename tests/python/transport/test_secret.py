"""Groups with a secret: the bits of groups without, cuts that lose nothing, nothing to read on the way, and named errors."""

import hashlib
import hmac
import math
import os
import secrets
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from reset_proxy import ResetProxy
from test_tcp import SECRET, needs_tls

import torch_lowcomm as lc
from torch_lowcomm import _C

DEADLINE_S = 90.0
ROOT = Path(__file__).parents[3]
OTHER = "c0pBTzHWtmPlKzjrLn7SdrZxdFKFEE9lbYgOxDY3xPI"
OPTIONS = {"min_bytes": 0}
POLICY = (
    "all_reduce=sym4; all_gather=minmax8; reduce_scatter=qsgd8; all_to_all=sym4; broadcast=sym8; gather=sym4; p2p=sym4"
)

pytestmark = needs_tls


def _results(r, n=70_001):
    """Every op's result, of seeded tensors."""
    torch.manual_seed(r.rank)
    mine = torch.randn(n * r.size)
    found = {"all_reduce": mine.clone(), "broadcast": mine.clone(), "all_to_all": torch.empty(n * r.size)}
    dist.all_reduce(found["all_reduce"])
    dist.broadcast(found["broadcast"], 1)
    dist.all_to_all_single(found["all_to_all"], mine)
    found["all_gather"] = torch.empty(n * r.size * r.size)
    dist.all_gather_into_tensor(found["all_gather"], mine)
    found["reduce_scatter"] = torch.empty(n)
    dist.reduce_scatter_tensor(found["reduce_scatter"], mine)
    gathered = [torch.empty(n * r.size) for _ in range(r.size)] if r.rank == 0 else None
    dist.gather(mine, gathered)
    found["gather"] = torch.cat(gathered) if gathered else torch.empty(0)
    found["message"] = torch.empty(n * r.size)
    to, of = (r.rank + 1) % r.size, (r.rank - 1) % r.size
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, to), dist.P2POp(dist.irecv, found["message"], of)]
    ):
        work.wait()
    with torch.no_grad():
        found["half"] = mine.to(torch.bfloat16)
    dist.all_reduce(found["half"])
    return found


@pytest.mark.parametrize(
    ("policy", "connections"),
    [
        pytest.param(POLICY, 1, marks=pytest.mark.on(2, timeout=DEADLINE_S)),
        pytest.param("", 2, marks=pytest.mark.on(2, timeout=DEADLINE_S)),
        pytest.param(POLICY, 2, marks=pytest.mark.on(4, timeout=DEADLINE_S)),
    ],
)
def test_the_bits_are_those_without_a_secret(r, policy, connections):
    found = []
    for secret in (None, SECRET):
        if secret:
            os.environ["LOWCOMM_SECRET"] = secret
        r.init("lowcomm", pg_options=lc.Options(policy=policy, connections=connections, **OPTIONS))
        found.append(_results(r))
        dist.destroy_process_group()
    for op, tensor in found[0].items():
        assert torch.equal(tensor, found[1][op]), op


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.on(2, timeout=DEADLINE_S)
def test_who_listens_sees_elements_only_without_a_secret(r, secret):
    """Rank 0 is reached through a tap only, which sees the elements without a secret, and none with one."""
    if secret:
        os.environ["LOWCOMM_SECRET"] = secret
    seen, tap = bytearray(), None
    if r.rank == 0:
        port = ranks.free_port()
        tap = ResetProxy(port, every_s=math.inf, seen=seen)
        os.environ["LOWCOMM_LISTEN"] = f"127.0.0.1:{port}"
        os.environ["LOWCOMM_ADVERTISE"] = f"127.0.0.1:{tap.port}"
    r.init("lowcomm", pg_options=lc.Options(policy="all_gather=fp16", **OPTIONS))
    mine = torch.full((5000,), float(r.rank + 1))
    both = torch.empty(10_000)
    dist.all_gather_into_tensor(both, mine)
    assert torch.equal(both, torch.tensor([1.0, 2.0]).repeat_interleave(5000))
    dist.destroy_process_group()
    if tap:
        ones = torch.ones(500, dtype=torch.float16).numpy().tobytes()
        assert len(seen) > 20_000
        assert (ones in seen) == (secret is None)
        assert (b"lowcom1" in seen) == (secret is None)
        assert SECRET.encode() not in seen
        assert (b"lowtls1" in seen) == (secret is not None)
        tap.close()


ANOTHER = "expected the same LOWCOMM_SECRET or LOWCOMM_SECRET_FILE on all ranks, got another secret there"
SHORT = "LOWCOMM_SECRET: expected 32 random bytes as text .* got 11 characters"
WRONG = {  # a text and an error for each rank; tests/cpp/transport/secret_test.cpp has what else a text and a file cannot be
    "another": [(SECRET, f"rank 2: {ANOTHER}"), (SECRET, f"rank 2: {ANOTHER}"), (OTHER, f"rank [01]: {ANOTHER}")],
    "none": [
        (SECRET, "making a group: secret differs: rank 0 has 'yes', rank 1 has 'no'"),
        (None, "making a group: secret differs: rank 1 has 'no', rank 0 has 'yes'"),
    ],
    "one is short": [(SECRET, SHORT), ("hello world", SHORT)],
}


@pytest.mark.parametrize(
    "each",
    [pytest.param(WRONG[what], id=what, marks=pytest.mark.on(len(WRONG[what]), timeout=DEADLINE_S)) for what in WRONG],
)
def test_a_wrong_secret_is_named_on_all(r, each):
    text, error = each[r.rank]
    os.environ.pop("LOWCOMM_SECRET", None)
    os.environ |= {"LOWCOMM_SECRET": text} if text else {}
    with pytest.raises((ValueError, dist.DistBackendError), match=error):
        r.init("lowcomm", timeout_s=20, pg_options=lc.Options(**OPTIONS))


@pytest.mark.on(2, timeout=DEADLINE_S)
def test_what_a_secret_goes_with(r):
    """What a secret goes with, and that a process has one."""
    os.environ["LOWCOMM_SECRET"] = SECRET
    with pytest.raises(ValueError, match="nccl: expected None or False with LOWCOMM_SECRET, .* got True"):
        r.init("lowcomm", timeout_s=20, pg_options=lc.Options(nccl=True))
    r.init("lowcomm", pg_options=lc.Options(**OPTIONS))
    os.environ["LOWCOMM_SECRET"] = OTHER
    what = "LOWCOMM_SECRET, LOWCOMM_SECRET_FILE: expected the secret of the groups that this process has, got another"
    with pytest.raises(ValueError, match=what):
        dist.new_group()
    os.environ["LOWCOMM_SECRET"] = SECRET
    x = torch.ones(10)
    dist.all_reduce(x)
    assert x[0] == r.size
    dist.destroy_process_group()


@pytest.mark.on(2, timeout=DEADLINE_S)
def test_a_process_that_ends_with_its_group_ends_cleanly(r):
    """Ends without destroying the group."""
    os.environ["LOWCOMM_SECRET"] = SECRET
    r.init("lowcomm", pg_options=lc.Options(policy="all_reduce=sym8", **OPTIONS))
    for _ in range(3):
        dist.all_reduce(torch.ones(100_000))


def _command(*arguments, **environment):
    command = [sys.executable, "-W", "ignore", "-m", "torch_lowcomm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment})


@pytest.mark.later
def test_info_tells_of_a_secret_as_the_pages_make_it(tmp_path):
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text(secrets.token_hex(32) + "\n")  # `openssl rand -hex 32`
    said = _command("info", "--no-self-test", LOWCOMM_SECRET_FILE=str(path))
    assert f"secret          of LOWCOMM_SECRET_FILE, TLS 1.3 by {_C.tls_library()}\n" in said.stdout, said.stderr
    assert path.read_text().strip() not in said.stdout


@pytest.mark.later
def test_info_tells_of_none_and_of_one_that_is_none():
    assert "secret          none is set, connections are not encrypted" in _command("info", "--no-self-test").stdout
    said = _command("info", "--no-self-test", LOWCOMM_SECRET="short")
    assert said.returncode == 2
    assert "torch_lowcomm info: LOWCOMM_SECRET: expected 32 random bytes" in said.stderr


def test_the_documented_key():
    """As csrc/wire/FORMAT.md says it: TcpSecure.DerivesTheDocumentedKeyAndCode has the same from the library."""
    identity = b"\nlowtls1" + bytes(range(16)) + struct.pack("<IIIQQI", 1, 0, 2, 88, 77, 1)
    assert len(identity) == 56
    extracted = hmac.new(bytes(32), SECRET.encode(), hashlib.sha256).digest()
    key = hmac.new(extracted, b"lowcomm tls 1" + identity + b"\x01", hashlib.sha256).hexdigest()
    document = (ROOT / "csrc/wire/FORMAT_TCP.md").read_text()
    assert f"`{SECRET}`" in document and f"`{key}`" in document
