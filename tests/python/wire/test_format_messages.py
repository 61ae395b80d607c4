"""Messages between the library and a rank that follows the page: announcements, frames, differences, withdrawals."""

import numpy as np
import pytest
import torch
from format_reader import codec_of, decode, parse
from format_reader.by_page import channel_of, ended, with_library
from format_reader.filling import Segment, fnv1a, plan
from format_reader.frame import Header
from format_reader.spec import IDS
from torch.distributed import DistBackendError

from torch_lowcomm import _C

N = 300001


@pytest.mark.parametrize("text", ["minmax4:bucket=1024", "sym8:bucket=1024", "fp16"])
def test_a_message_to_a_rank_that_follows_the_page(text):
    x = torch.randn(N, generator=torch.Generator().manual_seed(1))
    thread, errors, peer, done = with_library(f"p2p={text}", lambda group, x: group.send([x], 1, 7).wait(), x)
    spec = parse(text)
    description = f"dtype=float32\nelements={N}\ncodec={text}\n"
    frames = peer.receive_message("tag 7", description, plan([Segment(0, N, spec)], 65536))
    assert {header.key_hash for header, _ in frames} == {fnv1a(description)}
    assert {header.sequence for header, _ in frames} == {1}
    mine = np.concatenate([decode(codec_of(header), payload, header.elements) for header, payload in frames])
    ended(thread, done)
    assert not errors
    codec = _C.Codec(text)
    theirs = codec.decode(codec.encode(x), N)
    assert mine.tobytes() == np.asarray(theirs, dtype=np.float32).tobytes()


def test_a_message_from_a_rank_that_follows_the_page():
    y, x = torch.zeros(N, dtype=torch.int64), torch.arange(N)
    thread, errors, peer, done = with_library("p2p=sym8", lambda group, y: group.recv([y], 1, 3).wait(), y)
    head, text = peer.hear_announcement()
    description = f"dtype=int64\nelements={N}\ncodec=none\n"
    cut = plan([Segment(0, N, parse("none"))], 65536, 8)
    assert head.sequence == 1
    assert text == f"flow=tag 3\nframes={len(cut)}\nfirst tag={2**28}\n{description}"
    raw = x.numpy().tobytes()
    frames = []
    for frame in cut:
        payload = raw[8 * frame.first :][: frame.payload_bytes].ljust(frame.payload_bytes, b"\0")
        fields = (0, frame.elements, frame.first, 1, peer.epoch, 0, 0, fnv1a(description), len(payload), 0)
        frames.append((Header(b"LCMF", 2, 0, IDS["none"], 0, 0, 9, 0, *fields), payload))
    peer.send_message(text, frames)
    ended(thread, done)
    assert not errors
    assert torch.equal(y, x)


def test_a_message_that_differs_is_answered_by_error_frames():
    x = torch.randn(N)
    thread, errors, peer, done = with_library("p2p=sym8", lambda group, x: group.send([x], 1, 7).wait(), x)
    wrong = plan([Segment(0, 1000, parse("sym8:bucket=1024"))], 65536)
    frames = peer.receive_message("tag 7", "dtype=float32\nelements=1000\ncodec=sym8:bucket=1024\n", wrong * 3)
    assert [header.kind for header, _ in frames] == [1, 1, 1]
    for _, payload in frames:
        assert f"elements differs: rank 0 has '{N}', rank 1 has '1000'" in payload.decode()
    ended(thread, done)
    assert len(errors) == 1 and isinstance(errors[0], DistBackendError)
    assert f"elements differs: rank 0 has '{N}', rank 1 has '1000'" in str(errors[0])


def test_a_withdrawal_is_answered_and_the_block_begins_anew():
    x, refusals = torch.arange(100.0), []

    def part(group: object, x: torch.Tensor) -> None:
        try:  # the withdrawal may come before the message is posted, or after it
            channel_of(group, 8193).send(x, []).wait()
        except DistBackendError as error:
            refusals.append(str(error))
        _C.ChannelBlock(group, 1, 2).resume()
        channel_of(group, 8192).send(x, []).wait()
        channel_of(group, 8193).send(x, []).wait()

    thread, errors, peer, done = with_library("", part, x)
    description = "dtype=float32\nelements=100\nsamples=\nmemory=\ncodec=none\n"
    unsent = peer.expect_message("channel 8192", description, 1)
    peer.tell("withdrawn=2\nperiod=0\nwhy=a page\\nhas an end\n", 0)
    ((header, payload),) = unsent()
    assert (header.kind, header.sequence) == (1, 1)
    assert "rank 0" in payload.decode() and "a page\nhas an end" in payload.decode()
    head, text = peer.hear_announcement()
    assert head.sequence == 0
    assert text == "withdrawn=2\nperiod=0\nwhy=a page\\nhas an end\n"
    # Of the next period: the message that was answered by an error frame has been counted, the one left behind has not.
    for channel, number in ((8192, 2), (8193, 1)):
        ((header, payload),) = peer.expect_message(f"channel {channel}", description, 1)()
        assert (header.kind, header.sequence, header.channel) == (0, number, channel)
        assert payload[:400] == x.numpy().tobytes()
    ended(thread, done)
    assert not errors
    assert len(refusals) == 1 and "send of channel 8193" in refusals[0] and "a page\nhas an end" in refusals[0]
