"""Frames that are not what the format says end the group, on every live rank, with an error that says what is wrong with them.

The last of three ranks plays its part by hand: it sends its peers' own frames back to them (frames name no sender, and all
ranks send the same sizes), spoilt. Rank 0 or both live ranks get spoilt ones.
"""

import contextlib
import re
import struct
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from format_reader import crc32c
from format_reader.by_page import no_nccl
from format_reader.conversation import TAGS
from format_reader.tcp import Lanes

from torch_lowcomm import _C

HEADER = 64
ELEMENTS_AT, SEQUENCE_AT, SIZE_AT, CRC_AT = 16, 32, 56, 60
CULPRIT = 2
ELEMENTS = 20_000  # a rank: one frame


def _flip(frame, byte, mask=0x10):
    frame = frame.clone()
    frame[byte] ^= mask
    return frame


def _sealed(frame):
    """With the CRC of what it holds: only what the field means can give it away."""
    frame = frame.clone()
    crc = crc32c(frame[:CRC_AT].numpy().tobytes() + frame[HEADER:].numpy().tobytes())
    frame[CRC_AT:HEADER] = torch.tensor(list(struct.pack("<I", crc)), dtype=torch.uint8)
    return frame


CRC = r"crc32c: expected \d+, got \d+"
MAGIC = r"magic: expected \d+ \('LCMF'\), got "
ROOM = r"payload_bytes: expected at most \d+, got "
# A change to the last rank's data frame, and the text of the error: the field, what was expected and what was got.
CORRUPTIONS = {
    "payload bit": (lambda f: _flip(f, HEADER + 777), CRC),
    "magic": (lambda f: _flip(f, 0), MAGIC + r"\d+"),
    "huge payload size": (lambda f: _flip(f, SIZE_AT + 3, 0x7F), ROOM + r"21\d{8}"),
    # The reader goes on with the former content of the receiver's buffer, which may be the very frame that comes back.
    "truncated payload": (lambda f: _sealed(_flip(f, f.numel() - 1))[:-100], CRC),
    "truncated header": (lambda f: _sealed(_flip(f, ELEMENTS_AT))[:30], f"{CRC}|{ROOM}\\d+"),
    "unknown codec": (
        lambda f: _sealed(_flip(f, 6, 0x80)),
        r"codec: expected a number of this version's codecs .*, got 1(28|29|30)",
    ),
    "fewer elements": (
        lambda f: _sealed(_flip(f, ELEMENTS_AT)),
        r"elements: expected (16384, got 16400|20000, got 20016)",
    ),  # exact: the first of two frames
    "another op's": (lambda f: _sealed(_flip(f, SEQUENCE_AT)), r"sequence: expected \d+, got \d+"),
}
FEW = ("payload bit", "truncated payload", "another op's")
POLICIES = {"exact": "", "compressed": "all_gather=minmax8:bucket=64; reduce_scatter=qsgd4:bucket=64"}


def _join(store, size):
    """The connections of a group whose every byte this rank speaks; it has the options of rank 0."""
    store.set(f"lowcomm/hello/{CULPRIT}", store.get("lowcomm/hello/0"))
    store.get("lowcomm/epoch")
    return Lanes(store, CULPRIT, size)


def _play(lanes, name, victims):
    """The conversation of one op with both peers: its description, then its one data frame."""
    for n, step in enumerate(("description", "data")):
        tag = TAGS + n
        frames = [torch.frombuffer(bytearray(lanes.bulk[peer].receive(tag)), dtype=torch.uint8) for peer in (0, 1)]
        for peer, frame in enumerate(frames):
            if peer in victims and (step == "data" or name == "description"):
                frame = _flip(frame, HEADER) if name == "description" else CORRUPTIONS[name][0](frame).contiguous()
            with contextlib.suppress(OSError):  # the other one was told by the first, and has gone
                lanes.bulk[peer].send(tag, frame.numpy().tobytes())
        if name == "description":
            return


CASES = [
    *(("all_gather", "compressed", name, (0, 1)) for name in ("description", *CORRUPTIONS)),
    *(("reduce_scatter", "exact", name, (0, 1)) for name in ("description", *CORRUPTIONS)),
    # A spoilt frame to one rank reaches the other.
    *((op, "compressed", name, (0,)) for op in ("all_gather", "reduce_scatter") for name in FEW),
]


@pytest.mark.parametrize(("op", "kind", "name", "victims"), CASES)
@pytest.mark.on("trio")
def test_spoilt_frames(r, op, kind, name, victims):
    store = dist.FileStore(str(r.path("by hand")), r.size)
    if r.rank == CULPRIT:
        lanes = _join(store, r.size)
        _play(lanes, name, victims)
        for peer in (0, 1):
            r.hear(f"heard{peer}")
        lanes.close()
        return
    options = _C.Options(policy=POLICIES[kind], min_bytes=0)
    group = _C.create_backend(store, r.rank, r.size, options, timedelta(seconds=20), "by hand", [0, 1, 2], no_nccl)
    gathers = op == "all_gather"
    mine = torch.randn(ELEMENTS * (1 if gathers else r.size), generator=torch.Generator().manual_seed(r.rank))
    kept = mine.clone()
    out = torch.full((ELEMENTS * (r.size if gathers else 1),), 7.0)

    def issue():
        work = group._allgather_base(out, mine) if gathers else group._reduce_scatter_base(out, mine)
        work.wait()

    if r.rank not in victims:
        # Its own frames are whole, so this op may come to its end; the next one cannot.
        with contextlib.suppress(dist.DistBackendError):
            issue()
    with pytest.raises(dist.DistBackendError) as failure:
        issue()
    message = str(failure.value)
    found = CRC if name == "description" else CORRUPTIONS[name][1]
    assert re.search(found, message), f"no {found!r} in: {message}"
    for part in (op, f"rank {r.rank} ", f"rank {CULPRIT} ", "sequence", "group"):
        assert part in message, f"no {part!r} in: {message}"
    if r.rank in victims:
        untrusted = out[CULPRIT * ELEMENTS :] if gathers else out
        assert (untrusted == 7).all(), "a frame is checked before anything of it is used"
    assert torch.equal(mine, kept), "an op does not write to its input"
    with pytest.raises(dist.DistBackendError, match=found):  # the connection's order is lost, so the group is over
        issue()
    r.say(f"heard{r.rank}")
