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
    short = spec.bucket > 0 and name != "lattice"
    return Spec(name=name, bits=bits, bucket=128 if spec.bucket else 1024, short_meta=short, poison=spec.poison)


def places_bytes(n: int, k: int) -> tuple[int, int]:
    """The form, and the bytes of the places in it."""
    bitmap, listed = -(-n // 8), 4 * -(-n // REACH) + 2 * k
    return (1, listed) if listed < bitmap else (0, bitmap)


def chunk_bytes(spec: Spec, sent: int) -> tuple[int, int]:
    """The bytes of a chunk's places: those in unary, and the low bits."""
    return -(-2 * sent // 8), -(-(spec.spacing.bit_length() - 1) * sent // 8)


def topk_bytes(spec: Spec, n: int) -> int:
    """The size of a payload."""
    if n == 0:
        return 0
    if spec.bucket:
        k = -(-n // spec.spacing)
        return up64(sum(chunk_bytes(spec, k))) + grid_bytes(values_codec(spec), k)
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


def chunk_places(spec: Spec, part: U8, length: int, sent: int) -> I64:
    """The places in a chunk."""
    unary, low = chunk_bytes(spec, sent)[0] * 8, spec.spacing.bit_length() - 1
    bits = np.unpackbits(part, bitorder="little")
    ones = np.flatnonzero(bits[:unary])
    insist(ones.size == sent, f"{ones.size} places for {sent} elements")
    zeros(bits[unary + low * sent :], "bits past the last place")
    lows = bits[unary : unary + low * sent].reshape(sent, low) @ (1 << np.arange(low))
    places = (ones - np.arange(sent)) * spec.spacing + lows
    insist(bool((np.diff(places) > 0).all()), "places that do not ascend")
    insist(bool((places < length).all()), "a place past the last element")
    return places


def decode_chunks(spec: Spec, payload: U8, n: int) -> F32:
    """The n elements of a payload in chunks."""
    decoded, places, at = np.zeros(n, np.float32), [], 0
    for first in range(0, n, spec.bucket):
        length = min(spec.bucket, n - first)
        sent = -(-length // spec.spacing)
        end = at + sum(chunk_bytes(spec, sent))
        places.append(first + chunk_places(spec, payload[at:end], length, sent))
        at = end
    zeros(payload[at : up64(at)], "the padding of the places")
    decoded[np.concatenate(places)] = decode_grid(values_codec(spec), payload[up64(at) :], -(-n // spec.spacing))
    return decoded


def decode_topk(spec: Spec, payload: U8, n: int) -> F32:
    """The n elements of a payload whose size has been checked."""
    decoded = np.zeros(n, np.float32)
    if n == 0:
        return decoded
    if spec.bucket:
        return decode_chunks(spec, payload, n)
    k, codec = kept(spec, n), values_codec(spec)
    form, size = places_bytes(n, k)
    header = np.array([k], "<u8").tobytes() + bytes([IDS[codec.name], codec.bits, form, 0, 0, 0, 0, 0])
    insist(payload[:HEADER].tobytes() == header, "the header")
    end = HEADER + size
    zeros(payload[end : up64(end)], "the padding of the places")
    places = (listed_places if form else bitmap_places)(payload[HEADER:end], n, k)
    decoded[places] = decode_grid(codec, payload[up64(end) :], k)
    return decoded
