"""topk: how many, where, and their values under another codec."""

import math

import numpy as np

from format_reader.grid import decode_grid, grid_bytes
from format_reader.refusal import F32, I64, U8, insist, up64, zeros
from format_reader.spec import IDS, Spec, split_name

HEADER = 16
REACH = 65536


def kept(spec: Spec, n: int) -> int:
    """How many of n elements are sent, in float64."""
    return max(1, math.floor(spec.keep * n + 0.5))


def values_codec(spec: Spec) -> Spec:
    """The codec of the values."""
    name, bits = split_name(spec.values)
    return Spec(name=name, bits=bits, bucket=1024, poison=spec.poison)


def places_bytes(n: int, k: int) -> tuple[int, int]:
    """The form, and the bytes of the places in it."""
    bitmap, listed = -(-n // 8), 4 * -(-n // REACH) + 2 * k
    return (1, listed) if listed < bitmap else (0, bitmap)


def topk_bytes(spec: Spec, n: int) -> int:
    """The size of a payload."""
    if n == 0:
        return 0
    k = kept(spec, n)
    return up64(HEADER + places_bytes(n, k)[1]) + grid_bytes(values_codec(spec), k)


def bitmap_places(part: U8, n: int, k: int) -> I64:
    """The places in a bitmap."""
    bits = np.unpackbits(part, bitorder="little")
    zeros(bits[n:], "bits past the last element")
    places = np.flatnonzero(bits)
    insist(places.size == k, f"{places.size} bits for {k} elements")
    return places


def listed_places(part: U8, n: int, k: int) -> I64:
    """The places in a list by blocks of 65,536."""
    blocks = -(-n // REACH)
    counts = part[: 4 * blocks].view("<u4").astype(np.int64)
    insist(int(counts.sum()) == k, f"counts for {counts.sum()} of {k} elements")
    places = part[4 * blocks :].view("<u2") + np.repeat(np.arange(blocks) * REACH, counts)
    insist(bool((np.diff(places) > 0).all()), "places that do not ascend")
    insist(bool((places < n).all()), "a place past the last element")
    return places


def decode_topk(spec: Spec, payload: U8, n: int) -> F32:
    """The n elements of a payload whose size has been checked."""
    decoded = np.zeros(n, np.float32)
    if n == 0:
        return decoded
    k, codec = kept(spec, n), values_codec(spec)
    form, size = places_bytes(n, k)
    header = np.array([k], "<u8").tobytes() + bytes([IDS[codec.name], codec.bits, form, 0, 0, 0, 0, 0])
    insist(payload[:HEADER].tobytes() == header, "the header")
    end = HEADER + size
    zeros(payload[end : up64(end)], "the padding of the places")
    places = (listed_places if form else bitmap_places)(payload[HEADER:end], n, k)
    decoded[places] = decode_grid(codec, payload[up64(end) :], k)
    return decoded
