"""The bytes of an outer step by the formula of FORMAT.md: payloads of the slices of an all_reduce, and their frames."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch_lowcomm as lc

_HEADER = 64
_FRAME = 65_536  # payload of a full frame of messages that are not larger than 32 of them
_TEXT = 128  # of an op's description, about
_UNIT = 512  # elements that slices are a multiple of, at least


@dataclasses.dataclass
class Sent:
    """Bytes that one rank sends: payloads, frame headers and descriptions, and of the payloads places of values (topk's)."""

    payload: float = 0
    frames: float = 0
    places: float = 0

    @property
    def total(self) -> float:
        """Payloads and what is around them."""
        return self.payload + self.frames

    def plus(self, other: Sent, *, times: float = 1) -> Sent:
        """With another, so many times."""
        return Sent(*(getattr(self, f.name) + times * getattr(other, f.name) for f in dataclasses.fields(self)))


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
    back, places = 0, 0
    for i, count in enumerate(elements):
        for j, part in enumerate(slices(count, unit, world)):
            owner, size = (i * rotates + j) % world, codec.encoded_bytes(part)
            times = world - 1 if owner == me else 1
            places += times * place_bytes(codec, part)
            if owner == me:
                back += size
            else:
                to[owner] += size
    messages = [*(size for rank, size in enumerate(to) if rank != me), *[back] * (world - 1)]
    frames = sum(math.ceil(size / _FRAME) for size in messages)
    return Sent(sum(messages), frames * _HEADER + (world - 1) * (_HEADER + _TEXT), places)


def place_bytes(codec: lc.Codec, elements: int) -> int:
    """Of a payload: what says where topk's values stand."""
    if not codec.spec.startswith("topk") or elements == 0:
        return 0
    keep, values = (part.split("=")[1] for part in codec.spec.split(":", 1)[1].split(",")[:2])
    kept = max(1, math.floor(float(keep) * elements + 0.5))
    return codec.encoded_bytes(elements) - lc.codec(values).encoded_bytes(kept)


def outer_step(shapes: Sequence[Sequence[int]], codec: str | None, rank: int, world: int, me: int) -> Sent:
    """One outer step of parameters of those shapes; `rank` 0: no factors."""
    if codec is None:
        elements = sum(math.prod(shape) for shape in shapes)
        return Sent(2 * (world - 1) / world * 4 * elements)
    made = lc.codec(codec)
    plain = [math.prod(shape) for shape in shapes]
    if not rank:
        return all_reduce(plain, made, world, me)
    low = [factored(shape, rank) for shape in shapes]
    first = [rank * s[0] if f else n for s, n, f in zip(shapes, plain, low, strict=True)]
    second = [rank * n // s[0] if f else 0 for s, n, f in zip(shapes, plain, low, strict=True)]
    return all_reduce(first, made, world, me).plus(all_reduce(second, made, world, me))
