"""Messages of a channel between the library and a rank that follows the page: samples, versions, changes, memories."""

import numpy as np
import pytest
import torch
from format_reader.by_page import channel_of, ended, with_library
from format_reader.filling import fnv1a, plan
from format_reader.frame import Header
from format_reader.samples import Samples
from format_reader.spec import IDS
from torch.distributed import DistBackendError

from torch_lowcomm import _C

CHANNEL, ELEMENTS, CHUNK = 3, 24111, 65536
FIRST = "minmax8:bucket=128"
# Known and unknown samples in one message, in changing company.
BATCHES = ([1, 2, 3], [3, 4, 1], [5, 4], [1, 2, 3, 4, 5])


def activations(batch: list[int], visit: int) -> torch.Tensor:
    """Samples that move by a tenth from visit to visit."""
    rows = [torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(sample)) for sample in batch]
    drift = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(1000 + visit))
    return torch.stack(rows) + 0.1 * drift


@pytest.mark.parametrize("codec", ["gauss2:bucket=512", "sym4:bucket=64"])
def test_changes_to_a_rank_that_follows_the_page(codec):
    memory = _C.SampleMemory(ELEMENTS, ELEMENTS, "fp16")

    def send_all(group, _):
        end = channel_of(group, CHANNEL, codec, FIRST, ELEMENTS, memory)
        for visit, batch in enumerate(BATCHES):
            end.send(activations(batch, visit), batch).wait()

    thread, errors, peer, done = with_library("", send_all, torch.empty(0))
    samples = Samples(ELEMENTS, codec, FIRST)
    for visit, batch in enumerate(BATCHES):
        cut = plan(samples.layout(batch), CHUNK)
        assert len(batch) < 3 or visit > 0 or len(cut) > 1
        description, crc = samples.description(batch), samples.versions_crc(batch)
        frames = peer.receive_message(f"channel {CHANNEL}", description, cut)
        for header, _ in frames:
            assert (header.sequence, header.channel, header.state_version) == (visit + 1, CHANNEL, crc)
            assert header.key_hash == fnv1a(description)
        y = samples.take(batch, cut, [payload for _, payload in frames])
        x = activations(batch, visit).flatten().numpy()
        assert np.linalg.norm(y - x) < 0.1 * np.linalg.norm(x)
    ended(thread, done)
    assert not errors
    assert [row[:2] for row in memory.table()] == sorted(samples.versions.items())
    for sample, slot in samples.slots.items():
        assert memory.read(sample).numpy().tobytes() == slot.tobytes(), sample


def test_changes_from_a_rank_that_follows_the_page():
    """First visits, then changes: payloads by the library's codecs, all around them by the page."""
    memory, batch = _C.SampleMemory(ELEMENTS, ELEMENTS, "fp16"), [7, 9]
    got = [torch.empty(2, ELEMENTS), torch.empty(2, ELEMENTS)]

    def receive_both(group, _):
        end = channel_of(group, CHANNEL, "minmax4:bucket=64", FIRST, ELEMENTS, memory)
        for y in got:
            end.recv(y, batch).wait()

    thread, errors, peer, done = with_library("", receive_both, torch.empty(0))
    samples, values = Samples(ELEMENTS, "minmax4:bucket=64", FIRST), []
    for visit in range(2):
        description, cut = samples.description(batch), plan(samples.layout(batch), CHUNK)
        head, text = peer.hear_announcement()
        first_tag = 2**28 + 128 * visit
        expected = f"flow=channel {CHANNEL}\nframes={len(cut)}\nfirst tag={first_tag}\n{description}"
        assert (head.sequence, text) == (visit + 1, expected)
        segment = samples.layout(batch)[0].codec
        known = torch.tensor(np.concatenate([samples.slots.get(s, np.zeros(ELEMENTS, np.float16)) for s in batch]))
        change = activations(batch, visit).flatten() - known.float()
        codec = _C.Codec(samples.segments(batch)[0][2])
        payloads = [codec.encode(change[f.first : f.first + f.elements]).numpy().tobytes() for f in cut]
        frames = []
        for frame, payload in zip(cut, payloads, strict=True):
            place = (frame.elements, frame.first, visit + 1, peer.epoch, CHANNEL, samples.versions_crc(batch))
            kind = (IDS[segment.name], segment.bits, 0, 1, 0, segment.bucket)
            frames.append((Header(b"LCMF", 2, 0, *kind, *place, fnv1a(description), len(payload), 0), payload))
        peer.send_message(text, frames)
        values.append(samples.take(batch, cut, payloads))
    ended(thread, done)
    assert not errors
    for mine, theirs in zip(values, got, strict=True):
        assert mine.tobytes() == theirs.numpy().tobytes()
    for sample, slot in samples.slots.items():
        assert memory.read(sample).numpy().tobytes() == slot.tobytes(), sample


def test_samples_that_differ_are_answered_by_error_frames():
    memory = _C.SampleMemory(ELEMENTS, ELEMENTS, "fp16")

    def send(group, _):
        end = channel_of(group, CHANNEL, "gauss2", FIRST, ELEMENTS, memory)
        end.send(activations([1, 2], 0), [1, 2]).wait()

    thread, errors, peer, done = with_library("", send, torch.empty(0))
    samples = Samples(ELEMENTS, "gauss2", FIRST)
    samples.versions[2] = 4
    cut = plan(samples.layout([1, 2]), CHUNK)
    frames = peer.receive_message(f"channel {CHANNEL}", samples.description([1, 2]), cut)
    said = "samples differs: rank 0 has '1@0,2@0', rank 1 has '1@0,2@4'"
    assert all(header.kind == 1 and said in payload.decode() for header, payload in frames)
    ended(thread, done)
    assert len(errors) == 1 and isinstance(errors[0], DistBackendError) and said in str(errors[0])
    assert memory.table() == []
