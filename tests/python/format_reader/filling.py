"""Layouts, and the frames of a message as both sides know them beforehand."""

from dataclasses import dataclass

from format_reader.decode import encoded_bytes
from format_reader.spec import GRID, Spec, parse


@dataclass(frozen=True)
class Segment:
    """Consecutive elements under one codec."""

    first: int
    count: int
    codec: Spec


@dataclass
class Frame:
    """One frame of a message."""

    first: int
    elements: int = 0
    payload_bytes: int = 0


def read_layout(text: str) -> list[Segment]:
    """A layout's segments from its text."""
    lines = [line.split(" ", 2) for line in text.splitlines()]
    return [Segment(int(first), int(count), parse(codec.partition(" ")[0])) for first, count, codec in lines]


def fnv1a(text: str) -> int:
    """FNV-1a of 64 bits over the text."""
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def cannot_be_cut(codec: Spec) -> bool:
    """Whether a segment is one run whose bytes are cut."""
    return (codec.name == "topk" or codec.name in GRID) and codec.bucket == 0


def longest_run(segment: Segment, left: int, room: int, item: int) -> int:
    """The most of the `left` elements that fit: all, or a multiple of the granule."""
    if encoded_bytes(segment.codec, left, item) <= room:
        return left
    granule = max(512 * (segment.codec.spacing if segment.codec.name == "topk" else 1), segment.codec.bucket)
    n = (left - 1) // granule * granule
    while n > 0 and encoded_bytes(segment.codec, n, item) > room:
        n -= granule
    return n


def plan(segments: list[Segment], chunk: int, item: int = 4) -> list[Frame]:
    """The frames of a message of these segments."""
    total = sum(encoded_bytes(segment.codec, segment.count, item) for segment in segments)
    if any(segment.codec.name != "none" for segment in segments):
        chunk = min(chunk, max(65536, total // 32 // 64 * 64))
    largest = max(chunk, 65600)
    frames = [Frame(0)]

    def close() -> None:
        frames.append(Frame(frames[-1].first + frames[-1].elements))

    for segment in segments:
        if cannot_be_cut(segment.codec):
            p = encoded_bytes(segment.codec, segment.count, item)
            while p > 0:
                part = min(p, (chunk - frames[-1].payload_bytes) // 64 * 64)
                if part <= 0:
                    close()
                    continue
                frames[-1].payload_bytes += part
                p -= part
            frames[-1].elements += segment.count
            continue
        left = segment.count
        while left > 0:
            used = frames[-1].payload_bytes
            n = longest_run(segment, left, chunk - used, item) if used < chunk else 0
            if n == 0 and used == 0:
                n = longest_run(segment, left, largest, item)
            if n == 0:
                close()
                continue
            frames[-1].elements += n
            frames[-1].payload_bytes += encoded_bytes(segment.codec, n, item)
            left -= n
    return [frame for frame in frames if frame.payload_bytes]
