"""Tags beyond number: what a message leaves behind in its group."""

import pathlib

import pytest
import torch
import torch.distributed as dist
from p2p_cases import init, same

TAGS = 30_000
FIRST = 2000  # tags after which code, buffers and what is remembered are there
# Bytes that they may add to a process: 20 a tag are 2 MiB of 100,000, and pages of the heap are 200 kB.
BOUND = 600 << 10


def _resident():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


def _messages(r, tags, x, got):
    """One message a tag from rank 0 to rank 1, fifty under way at a time."""
    for first in range(tags.start, tags.stop, 50):
        window = range(first, min(first + 50, tags.stop))
        works = [dist.isend(x, 1, tag=t) if r.rank == 0 else dist.irecv(got, 0, tag=t) for t in window]
        for work in works:
            work.wait()


def _tags(r):
    codec = init(r, "sym4:bucket=64", flight_record=0)
    x, got = torch.arange(64.0), torch.zeros(64)
    want = codec.roundtrip(x)
    _messages(r, range(FIRST), x, got)
    dist.barrier()
    before = _resident()
    _messages(r, range(FIRST, FIRST + TAGS), x, got)
    grown = _resident() - before
    # Tags that were used long ago still do, in both directions.
    for tag in (0, 1, FIRST, FIRST + TAGS - 1):
        for sender in range(2):
            got.zero_()
            dist.send(x, 1 - sender, tag=tag) if r.rank == sender else dist.recv(got, sender, tag=tag)
            same(got if r.rank != sender else want, want)
    return grown


@pytest.mark.slow
def test_a_tag_leaves_nothing_behind(pair):
    grown = pair(_tags)
    assert max(grown) < BOUND, f"expected less than {BOUND} bytes of {TAGS} tags, got {grown}"


def _unasked(r):
    """Of tags beyond those that a sender counts one by one: a receive that nobody waits for, and many messages after it."""
    init(r, "sym4:bucket=64", flight_record=0)
    x, got = torch.arange(64.0), torch.zeros(64)
    _messages(r, range(FIRST), x, got)
    dist.barrier()
    works = [dist.isend(x, 1, tag=FIRST) if r.rank == 0 else dist.irecv(got, 0, tag=FIRST) for _ in range(2)]
    works[1].wait()  # the first has come with it
    del works
    dist.barrier()
    before = _resident()
    _messages(r, range(FIRST, FIRST + TAGS), x, got)
    return _resident() - before


@pytest.mark.later
def test_a_receive_that_nobody_waits_for_leaves_nothing_behind(pair):
    grown = pair(_unasked)
    assert max(grown) < BOUND, f"expected less than {BOUND} bytes of {TAGS} messages, got {grown}"
