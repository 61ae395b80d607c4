"""The rotation of blocks of 512, undone: transform, factor, signs."""

import numpy as np

from format_reader.document import sign_words
from format_reader.refusal import F32, U32, bits_of, float_of

FACTORS = {1: 0x3F800000, 2: 0x3F3504F3, 4: 0x3F000000, 8: 0x3EB504F3, 16: 0x3E800000, 32: 0x3E3504F3}  # by rows
SIGN = np.uint32(0x80000000)


def transform(rows: F32, together: int) -> F32:
    """Sums and differences of rows in [block, row, lane], of which `together` are transformed together."""
    for h in (h for h in (1, 2, 4, 8, 16) if h < together):
        pairs = rows.reshape(len(rows), 16 // h, 2, h, 16)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        rows = np.stack([a + b, a - b], axis=2).reshape(-1, 32, 16)
    return rows


def flips() -> U32:
    """The sign bit for each row and lane whose bit in the lane's word of signs is set."""
    rows = np.arange(32, dtype=np.uint32)[:, None]
    return ((sign_words()[None, :] >> rows) & np.uint32(1)) * SIGN


def turns(blocks: int) -> U32:
    """What the words of signs are XORed with in blocks that turn."""
    x = np.arange(blocks, dtype=np.uint32)
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    x = (x ^ x >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return x ^ x >> np.uint32(16)


def turned(blocks: int) -> U32:
    """The sign bit for each block and row whose bit in the block's turn is set."""
    rows = np.arange(32, dtype=np.uint32)
    return (((turns(blocks)[:, None] >> rows) & np.uint32(1)) * SIGN)[:, :, None]


def across_lanes(rows: F32) -> F32:
    """Sums and differences of the lanes of [block, row, lane]."""
    for h in (1, 2, 4, 8):
        pairs = rows.reshape(len(rows), 32, 8 // h, 2, h)
        a, b = pairs[:, :, :, 0], pairs[:, :, :, 1]
        rows = np.stack([a + b, a - b], axis=3).reshape(-1, 32, 16)
    return rows


def undo(rotated: F32, together: int, units: bool) -> F32:
    """The elements of whole blocks, from what was decoded, of which `together` rows were rotated together."""
    factor = float_of(np.array([FACTORS[together]], np.uint32))
    rows = transform(rotated.reshape(-1, 32, 16), together) * (factor / np.float32(4) if units else factor)
    signs = flips()
    if units:
        rows = across_lanes(rows)
        signs = signs ^ turned(len(rows))
    return float_of(bits_of(rows) ^ signs).reshape(-1)
