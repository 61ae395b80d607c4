"""The bytes of an outer step by the formula of FORMAT.md: payloads of the slices of an all_reduce, and their frames."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch_lowcomm as lc

_HEADER = 64
_FRAME = 65_536  # payload of a full frame of messages that are not larger than 32 of them
_TEXT = 128  # of an op's description, about
_UNIT = 512  # elements that slices are a multiple of, at least

Sent = tuple[float, float]  # bytes that one rank sends: payloads, and frame headers with descriptions


def slices(elements: int, unit: int, world: int) -> list[int]:
    """Elements of each rank's slice of a tensor."""
    length = math.ceil(math.ceil(elements / unit) / world) * unit
    return [max(0, min(elements, (r + 1) * length) - r * length) for r in range(world)]


def factored(shape: Sequence[int], rank: int) -> bool:
    """Whether a tensor travels as factors of that rank."""
    rows, columns = shape[0], math.prod(shape[1:])
    return 0 < rank < min(rows, columns) and rows * columns > rank * (rows + columns) and len(shape) > 1


def all_reduce(elements: Sequence[int], codec: lc.Codec, world: int, me: int, *, rotates: bool = True) -> Sent:
    """One coded all_reduce of several tensors: to each owner its slice, and the own ones, reduced, to all others.

    `rotates`: as in a compressed all_reduce, the i-th tensor's first slice is the i-th rank's.
    """
    unit = max(_UNIT, codec.bucket)
    to = [0] * world  # payload of the message to each rank
    back = 0
    for i, count in enumerate(elements):
        for j, part in enumerate(slices(count, unit, world)):
            owner, size = (i * rotates + j) % world, codec.encoded_bytes(part)
            if owner == me:
                back += size
            else:
                to[owner] += size
    messages = [*(size for rank, size in enumerate(to) if rank != me), *[back] * (world - 1)]
    frames = sum(math.ceil(size / _FRAME) for size in messages)
    return sum(messages), frames * _HEADER + (world - 1) * (_HEADER + _TEXT)


def outer_step(shapes: Sequence[Sequence[int]], codec: str | None, rank: int, world: int, me: int) -> Sent:
    """One outer step of parameters of those shapes; `rank` 0: no factors."""
    plain = [math.prod(shape) for shape in shapes]
    if codec is None:
        return 2 * (world - 1) / world * 4 * sum(plain), 0
    made = lc.codec(codec)
    low = [factored(shape, rank) for shape in shapes]
    first = [rank * s[0] if f else n for s, n, f in zip(shapes, plain, low, strict=True)]
    second = [rank * n // s[0] for s, n, f in zip(shapes, plain, low, strict=True) if f]
    ways = [all_reduce(part, made, world, me) for part in (first, second) if part]
    return sum(payload for payload, _ in ways), sum(frames for _, frames in ways)
