"""The bytes of an all_reduce by the formula of FORMAT.md: payloads of its slices, and their frames."""

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


def all_reduce(elements: Sequence[int], codec: lc.Codec, world: int, me: int) -> Sent:
    """One coded all_reduce of several tensors: to each owner its slice, and the own ones, reduced, to all others."""
    unit = max(_UNIT, codec.bucket)
    to = [0] * world  # payload of the message to each rank
    back = 0
    for count in elements:
        for owner, part in enumerate(slices(count, unit, world)):
            size = codec.encoded_bytes(part)
            if owner == me:
                back += size
            else:
                to[owner] += size
    messages = [*(size for rank, size in enumerate(to) if rank != me), *[back] * (world - 1)]
    frames = sum(math.ceil(size / _FRAME) for size in messages)
    return sum(messages), frames * _HEADER + (world - 1) * (_HEADER + _TEXT)
