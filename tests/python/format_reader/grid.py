"""Grid codecs: metadata of the buckets, then codes, and a value for each code."""

import numpy as np

from format_reader.blocks import BLOCK, LANES, block_bytes, unpack
from format_reader.document import gauss_levels
from format_reader.refusal import F32, I64, QUIET_NAN, U8, U32, float_of, insist, up64, zeros
from format_reader.rotation import undo
from format_reader.spec import Spec


def buckets(spec: Spec, n: int) -> int:
    """How many buckets n elements, more than none, have."""
    if spec.channels:
        insist(n % spec.channels == 0, f"{n} elements in {spec.channels} channels")
        return spec.channels
    return -(-n // spec.bucket) if spec.bucket else 1


def numbers(spec: Spec, n: int) -> I64:
    """The number of each element's bucket."""
    element = np.arange(n)
    if spec.channels:
        return element % spec.channels
    return element // spec.bucket if spec.bucket else np.zeros_like(element)


def stored(spec: Spec, n: int) -> int:
    """How many codes are in a payload: whole blocks where they are of rotated elements."""
    return -(-n // BLOCK) * BLOCK if spec.rotated and spec.bucket >= BLOCK else n


def grid_bytes(spec: Spec, n: int) -> int:
    """The size of a payload."""
    if n == 0:
        return 0
    return up64(spec.meta_bytes * buckets(spec, n)) + block_bytes(stored(spec, n), spec.bits)


def metadata(spec: Spec, part: U8) -> tuple[F32, F32]:
    """Base and step of every bucket; the bases are 0 where none are sent."""
    if spec.short_meta:
        patterns: U32 = part.view("<u2").astype(np.uint32) << np.uint32(16)
    else:
        patterns = part.view("<u4").astype(np.uint32)
    sent = patterns.reshape(-1, 2 if spec.has_base else 1)
    finite = (sent & 0x7F800000) != 0x7F800000
    poisoned = sent[:, 0] == QUIET_NAN
    if spec.has_base:
        poisoned = poisoned & (sent[:, 1] == 0)
    accepted = finite.all(axis=1) | (poisoned & spec.poison)
    insist(bool(accepted.all()), "a base or step that is not finite")
    base = sent[:, 0] if spec.has_base else np.zeros(len(sent), np.uint32)
    return float_of(base), float_of(sent[:, -1])


def values(spec: Spec, u: I64, base: F32, step: F32, table: F32 | None) -> F32:
    """Each code's value, every operation rounded to float32; `base` and `step` are the element's own."""
    half = 2 ** (spec.bits - 1)
    match spec.name:
        case "minmax" | "qsgd" | "lattice":
            return base + step * u.astype(np.float32)
        case "sym":
            return (u - half).astype(np.float32) * step
        case "mid":
            return (u - (half - 0.5)).astype(np.float32) * step
        case "sign1":
            return np.where((u == 1) | np.isnan(step), step, -step)
        case "levels":
            assert table is not None and table.size == 2**spec.bits
            return base + step * table[u]
        case _:
            return (gauss_levels(spec.bits)[u] * step) * np.float32(spec.gain)


def short_lanes(n: int, codes: I64) -> None:
    """Where the last block has less than 16 elements, lanes without one have the code 0 throughout."""
    q = n % BLOCK
    if 0 < q < LANES:
        insist(not codes[-BLOCK:].reshape(-1, LANES)[:, q:].any(), "codes of lanes without an element")


def decode_grid(spec: Spec, payload: U8, n: int, table: F32 | None = None, *, units: bool = False) -> F32:
    """The n elements of a payload whose size has been checked; `units`: a part of units."""
    if n == 0:
        return np.zeros(0, np.float32)
    count = buckets(spec, n)
    meta = spec.meta_bytes * count
    base, step = metadata(spec, payload[:meta])
    zeros(payload[meta : up64(meta)], "the padding of the metadata")
    m = stored(spec, n)
    codes = unpack(payload[up64(meta) :], m, spec.bits)
    bucket = numbers(spec, m)
    decoded = values(spec, codes, base[bucket], step[bucket], table)
    if not spec.rotated:
        return decoded
    if m > n:
        short_lanes(n, codes)
    whole = np.append(decoded, np.zeros(-m % BLOCK, np.float32))
    return undo(whole, min(spec.bucket // LANES, 32), units)[:n]
