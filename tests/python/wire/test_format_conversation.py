"""A rank that the page's reader plays, in a group with a rank of the library: both gather the same numbers."""

import re
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from format_reader import codec_of, decode, parse
from format_reader.by_page import TIMEOUT, ended, no_nccl, with_library
from format_reader.conversation import TAGS, Peer
from format_reader.filling import Segment, cannot_be_cut, plan
from format_reader.frame import read_frame, write_frame
from format_reader.spec import IDS
from torch.distributed import HashStore

from torch_lowcomm import _C


def gathering(policy, x, **options):
    """Rank 0, the library, gathers into the first; the others are as with_library has them."""
    y = torch.empty(2 * x.numel())
    return y, *with_library(policy, lambda group, x: group._allgather_base(y, x).wait(), x, **options)


@pytest.mark.parametrize(
    "text",
    [
        "minmax4:bucket=1024",
        "qsgd2:bucket=512,meta=bf16,rotate=1",
        "gauss3:bucket=512",
        "minmax4:bucket=tensor",
        "topk:keep=0.3,values=sym8",
        "bf16",
        "log9",
    ],
)
def test_an_all_gather_with_a_rank_that_follows_the_page(text):
    n = 300001
    x = torch.randn(n, generator=torch.Generator().manual_seed(1))
    spec = parse(text)
    y, thread, errors, peer, done = gathering(f"all_gather={text}", x)
    host, *fields = peer.hello.split("\n")
    assert host.startswith("host=") and fields[:2] == ["wire_version=2", f"policy=all_gather={text}"]
    assert "chunk_bytes=65536\n" in peer.hello
    description, rounds = peer.gather(plan([Segment(0, n, spec)], 65536))
    ended(thread, done)
    assert not errors
    assert description == f"op=all_gather\ntensors=1\ndtype=float32\nelements a rank={n}\ncodec={text}\n"
    assert {header.codec for header, _ in rounds} == {IDS[spec.name]}
    if cannot_be_cut(spec):
        mine = decode(spec, b"".join(payload for _, payload in rounds), n)
    else:
        runs = [decode(codec_of(header), payload, header.elements) for header, payload in rounds]
        mine = np.concatenate(runs)
    for theirs in y.view(2, n).numpy():
        assert mine.tobytes() == theirs.tobytes()


def test_an_exact_all_gather_with_a_rank_that_follows_the_page():
    """Its frames are full ones, where an encoded message of as many bytes has shorter ones."""
    n, chunk_bytes = 300001, 262144
    x = torch.randn(n, generator=torch.Generator().manual_seed(1))
    y, thread, errors, peer, done = gathering(None, x, chunk_bytes=chunk_bytes)
    frames = plan([Segment(0, n, parse("none"))], chunk_bytes)
    _, rounds = peer.gather(frames)
    ended(thread, done)
    assert not errors
    assert [frame.payload_bytes for frame in frames] == [262144] * 4 + [151488]
    mine = np.concatenate([decode(codec_of(header), payload, header.elements) for header, payload in rounds])
    assert mine.tobytes() == x.numpy().tobytes()
    for theirs in y.view(2, n).numpy():
        assert mine.tobytes() == theirs.tobytes()


def flipped(frame, byte, mask=0x10):
    return frame[:byte] + bytes([frame[byte] ^ mask]) + frame[byte + 1 :]


def resealed(frame, **fields):
    """With the CRC of what it holds: only what a field means can give it away."""
    header, payload = read_frame(frame)
    return write_frame(
        replace(header, **{name: change(getattr(header, name)) for name, change in fields.items()}), payload
    )


CRC = r"crc32c: expected \d+, got \d+"
# A change of the data frame, and the text of the error: the field, what was expected and what was got.
SPOILT = {
    "a bit of the payload": (lambda f: flipped(f, 64 + 777), CRC),
    "the magic": (lambda f: flipped(f, 0), r"magic: expected \d+ \('LCMF'\), got \d+"),
    "a huge size": (lambda f: flipped(f, 59, 0x7F), r"payload_bytes: expected at most \d+, got 21\d{8}"),
    # The reader goes on with the former content of the receiver's buffer.
    "cut in its payload": (lambda f: f[:-100], CRC),
    "cut in its header": (lambda f: f[:30], rf"{CRC}|payload_bytes: expected at most"),
    "an unknown codec": (lambda f: resealed(f, codec=lambda codec: codec | 128), "codec: expected a number of this"),
    "more elements": (lambda f: resealed(f, elements=lambda n: n + 16), "elements: expected 20000, got 20016"),
    "another op's": (lambda f: resealed(f, sequence=lambda n: n + 1), r"sequence: expected \d+, got \d+"),
}


@pytest.mark.parametrize("what", ["the description", *SPOILT])
def test_nothing_of_a_spoilt_frame_is_used(what):
    x, y = torch.randn(20_000), torch.full((40_000,), 7.0)
    kept = x.clone()
    text = "all_gather=minmax8:bucket=64"
    thread, errors, peer, _ = with_library(text, lambda group, x: group._allgather_base(y, x).wait(), x)
    change, said = SPOILT.get(what, (lambda f: flipped(f, 64), CRC))
    for tag in (TAGS,) if what == "the description" else (TAGS, TAGS + 1):
        frame = peer.bulk.receive(tag)
        peer.bulk.send(tag, frame if tag == TAGS and what in SPOILT else change(frame))
    thread.join(30)
    (error,) = errors
    assert isinstance(error, torch.distributed.DistBackendError)
    for part in (said, "all_gather", "rank 0 ", "rank 1 ", "sequence", "group"):
        assert re.search(part, str(error)), f"no {part!r} in: {error}"
    assert (y[20_000:] == 7).all(), "a frame is checked before anything of it is used"
    assert torch.equal(x, kept), "an op does not write to its input"


def test_a_group_is_made_though_its_peer_has_left_it():
    """A rank that made its group first and left it fails the other one's first op, not the making of its group."""
    store, made = HashStore(), {}

    def make():
        try:
            made["group"] = _C.create_backend(store, 0, 2, _C.Options(), TIMEOUT, "left early", [0, 1], no_nccl)
        except Exception as error:
            made["error"] = error

    rank0 = threading.Thread(target=make, daemon=True)
    rank0.start()
    Peer(store).lanes.close()
    rank0.join(30)
    assert "error" not in made, made
    with pytest.raises(torch.distributed.DistBackendError, match="all_gather failed between rank 0 .* and rank 1"):
        made["group"]._allgather_base(torch.empty(2), torch.ones(1)).wait()
