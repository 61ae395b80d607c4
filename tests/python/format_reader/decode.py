"""A payload under a codec's text, as float32 numbers."""

import numpy as np

from format_reader.casts import NAN, cast_bytes, decode_cast
from format_reader.grid import decode_grid, grid_bytes
from format_reader.refusal import F32, U8, insist, up64, zeros
from format_reader.scalars import BITS, decode_scalars, scalar_bytes
from format_reader.spec import Spec, parse
from format_reader.topk import decode_topk, topk_bytes
from format_reader.units import decode_units, unit_bytes


def encoded_bytes(codec: Spec, n: int, item: int = 4) -> int:
    """The size of a payload of n elements, `item` bytes each where they are sent as they are."""
    if codec.name == "none":
        return up64(n * item)
    if codec.name in NAN:  # a cast
        return cast_bytes(n)
    if codec.name in BITS:
        return scalar_bytes(codec, n)
    if codec.name == "topk":
        return topk_bytes(codec, n)
    return unit_bytes(codec, n) if codec.unit else grid_bytes(codec, n)


def decode_exact(payload: U8, n: int, item: int = 4) -> U8:
    """The bytes of n elements that were sent as they are."""
    zeros(payload[n * item :], "the padding")
    return payload[: n * item]


def decode(codec: str | Spec, payload: bytes, n: int, table: F32 | None = None) -> F32:
    """Decode n elements, or refuse.

    Args:
        codec: The codec, or its text.
        payload: The bytes that were sent.
        n: How many elements were.
        table: The levels of `levels`.

    Returns:
        The n float32 numbers that every reader gets.
    """
    spec = parse(codec) if isinstance(codec, str) else codec
    part = np.frombuffer(payload, np.uint8)
    expected = encoded_bytes(spec, n)
    insist(part.size == expected, f"a payload of {part.size} bytes: expected {expected}")
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if spec.name == "none":
            return decode_exact(part, n).view("<f4").astype(np.float32)
        if spec.name in NAN:
            return decode_cast(spec, part, n)
        if spec.name in BITS:
            return decode_scalars(spec, part, n)
        if spec.name == "topk":
            return decode_topk(spec, part, n)
        return decode_units(spec, part, n) if spec.unit else decode_grid(spec, part, n, table)
