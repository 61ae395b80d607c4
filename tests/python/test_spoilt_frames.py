"""Frames that are not what the format says end the group with an error that says what is wrong with them."""

import re
import struct

import pytest
import ranks
import torch
import torch.distributed as dist
from group_check import check_group

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
        check_group(r)
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
