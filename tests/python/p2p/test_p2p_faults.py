"""Coded messages whose peer dies, stops, stays away or means another tensor: named errors on live ranks."""

import contextlib
import os
import re
import signal
import time

import pytest
import ranks
import torch
import torch.distributed as dist
from collective_cases import bits, values
from compressed_by_hand import options
from p2p_cases import neighbours, same, swap

import torch_lowcomm as lc

BIG = 1 << 22
DEADLINE_S = 60.0  # the harness's
NEVER_S = 10 * DEADLINE_S  # waiting for it fails the test
SPEC = "sym4:bucket=1024"


def _init(r, timeout_s):
    r.init("lowcomm", timeout_s=timeout_s, pg_options=options(f"p2p={SPEC}"))


def _says_everything(message, op, rank, peer):
    parts = [
        rf"{op} with tag \d+ failed between rank {rank}\b.* and rank {peer}\b",
        r"sequence \d+",
        "group ",
        r"bytes sent \d+",
        r"bytes received \d+",
        r"elapsed \d",
    ]
    missing = [part for part in parts if not re.search(part, message)]
    assert not missing, f"no {missing} in: {message}"


def _goes_on(r, members):
    """The process is whole: the lost group says so at once, ends, and another one works."""
    for op in (dist.isend, dist.irecv):
        with pytest.raises(dist.DistBackendError, match="of a lost group; destroy it and make a new one. First cause"):
            op(torch.ones(5000), (r.rank + 1) % r.size).wait()
    with pytest.raises(dist.DistBackendError, match="First cause"):
        dist.barrier()
    dist.destroy_process_group()
    again = ranks.Rank(r.rank, members, r.folder, stores=10)
    if members == 1:
        return
    _init(again, 30)
    got = torch.zeros(5000)
    swap(again, values(torch.float32, 5000, r.rank), got)
    same(got, lc.codec(SPEC).roundtrip(values(torch.float32, 5000, neighbours(again)[1])))
    dist.destroy_process_group()


KILLED = pytest.mark.on(3, allow_exit={2: -signal.SIGKILL}, timeout=DEADLINE_S)
STOPPED = [pytest.mark.on(2, kill_last=[1], timeout=DEADLINE_S), pytest.mark.later]


@pytest.mark.parametrize("op", ["send", "recv"])
@pytest.mark.parametrize(
    ("how", "timeout_s"), [pytest.param("killed", NEVER_S, marks=KILLED), pytest.param("stopped", 2.0, marks=STOPPED)]
)
def test_a_lost_peer_is_named(r, how, timeout_s, op):
    """The last rank dies or stops in the middle of an exchange with rank 0; a death is seen long before any time-out."""
    _init(r, DEADLINE_S)
    culprit = r.size - 1
    got, x = torch.zeros(BIG), torch.ones(BIG)
    if r.rank in (0, culprit):
        peer = culprit - r.rank
        for work in [dist.irecv(got, peer), dist.isend(x, peer)]:
            work.wait()
    dist.barrier()
    r.set_deadline(timeout_s)
    if r.rank == culprit:
        (dist.isend if op == "recv" else dist.irecv)(x, 0)
        time.sleep(0.002)  # into it
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    if r.rank == 0:
        with pytest.raises(dist.DistBackendError) as failure:
            for _ in range(5):  # the first may have been through before the signal
                (dist.send if op == "send" else dist.recv)(x, culprit)
        said = str(failure.value)
        _says_everything(said, op, 0, culprit)
        assert how == "killed" or re.search(r"(?i)timed out waiting 2000 ?ms", said), said
        _goes_on(r, r.size - 1)
        return
    # A rank that waits for one that gave the group up hears its reason.
    with pytest.raises(dist.DistBackendError) as failure:
        dist.recv(torch.zeros(5000), 0)
    _says_everything(str(failure.value), "recv", r.rank, 0)
    assert re.search("gave the group up.*rank 2", str(failure.value)), failure.value
    _goes_on(r, r.size - 1)


# Rank 0 sends the first of two (elements, dtype, whether exact), rank 1 expects the second: both are told the field.
DIFFERENCES = {
    "another dtype": ((999, torch.bfloat16, False), (999, torch.float32, False), ("dtype", "bfloat16", "float32")),
    "exact": ((999, torch.float32, True), (999, torch.float32, False), ("codec", "none", SPEC)),
    "types the wire carries as bytes": (
        (512, torch.uint16, False),
        (1024, torch.float8_e4m3fn, False),
        ("dtype", "UInt16", "Float8_e4m3fn"),
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_messages_that_differ_are_told_on_both_ranks_and_the_group_goes_on(r, name):
    *both, (field, sent, expected) = DIFFERENCES[name]
    elements, dtype, exact = both[r.rank]
    said = f"{field} differs: rank 0 has '{sent}', rank 1 has '{expected}'"
    _init(r, NEVER_S)
    x = torch.ones(elements, dtype=torch.float32).to(dtype)
    with contextlib.ExitStack() as scope:
        if exact:
            scope.enter_context(lc.exact())
        with pytest.raises(dist.DistBackendError, match=re.escape(said)) as failure:
            dist.send(x, 1) if r.rank == 0 else dist.recv(x, 0)
    assert "ranks issued different messages" in str(failure.value)
    assert (x.float() == 1).all(), "nothing of the message is used"
    # The group goes on, also for messages of the same tag.
    got = torch.zeros(5000)
    dist.send(values(torch.float32, 5000, 3), 1) if r.rank == 0 else dist.recv(got, 0)
    if r.rank == 1:
        assert torch.equal(bits(got), bits(lc.codec(SPEC).roundtrip(values(torch.float32, 5000, 3))))
    dist.destroy_process_group()
