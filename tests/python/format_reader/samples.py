"""The memory of samples on one side of a channel, from the page's "Pipelines"."""

import struct
from itertools import groupby

import numpy as np

from format_reader.decode import decode, encoded_bytes
from format_reader.filling import Frame, Segment, fnv1a
from format_reader.frame import crc32c
from format_reader.refusal import F32
from format_reader.spec import parse


class Samples:
    """What a side remembers: float16, `elements` numbers a sample."""

    def __init__(self, elements: int, codec: str, first: str) -> None:
        self.elements, self.codec, self.first = elements, codec, first
        self.versions: dict[int, int] = {}
        self.slots: dict[int, np.ndarray] = {}

    def segments(self, batch: list[int]) -> list[tuple[int, int, str]]:
        """(first element, count, codec's text) of a message: neighbours that are all known, or all not, share one."""
        found, at = [], 0
        for known, run in groupby(batch, key=lambda sample: sample in self.versions):
            count = len(list(run)) * self.elements
            found.append((at, count, self.codec if known else self.first))
            at += count
        return found

    def layout(self, batch: list[int]) -> list[Segment]:
        """The same as segments of a layout."""
        return [Segment(first, count, parse(codec)) for first, count, codec in self.segments(batch)]

    def description(self, batch: list[int]) -> str:
        """The text by which both sides compare."""
        segments = self.segments(batch)
        text = "".join(f"{first} {count} {codec}\n" for first, count, codec in segments)
        several = f"layout of {len(segments)} segments, hash {fnv1a(text)}"
        keys = ",".join(f"{sample}@{self.versions.get(sample, 0)}" for sample in batch)
        codec = segments[0][2] if len(segments) == 1 else several
        elements = len(batch) * self.elements
        return f"dtype=float32\nelements={elements}\nsamples={keys}\nmemory=float16\ncodec={codec}\n"

    def versions_crc(self, batch: list[int]) -> int:
        """The frames' `state_version`."""
        return crc32c(b"".join(struct.pack("<I", self.versions.get(sample, 0)) for sample in batch))

    def take(self, batch: list[int], frames: list[Frame], payloads: list[bytes]) -> F32:
        """The float32 numbers of a message, which the memory then knows."""
        y = np.concatenate([self.slots.get(sample, np.zeros(self.elements, np.float16)) for sample in batch])
        y = y.astype(np.float32)
        for frame, payload in zip(frames, payloads, strict=True):
            at = 0
            for segment in self.layout(batch):
                first = max(segment.first, frame.first)
                count = min(segment.first + segment.count, frame.first + frame.elements) - first
                if count <= 0:
                    continue
                size = encoded_bytes(segment.codec, count)
                y[first : first + count] += decode(segment.codec, payload[at : at + size], count)
                at += size
        for i, sample in enumerate(batch):
            held = np.clip(y[i * self.elements :][: self.elements], -65504, 65504)
            self.slots[sample] = held.astype(np.float16)
            self.versions[sample] = self.versions.get(sample, 0) + 1
        return y
