"""Codes in blocks of 512: sixteen lanes, each one string of bits."""

import numpy as np

from format_reader.refusal import I64, U8, insist, zeros

BLOCK = 512
LANES = 16


def block_bytes(n: int, bits: int) -> int:
    """Returns the bytes of the codes of n elements."""
    rows = -(-(n % BLOCK) // LANES)
    return 64 * (bits * (n // BLOCK) + -(-rows * bits // 32))


def lane_bits(part: U8, words: int) -> U8:
    """Blocks of `words` words a lane, as [block, lane, bit of the lane's string]."""
    by_word = part.reshape(-1, words, LANES, 4)  # a word is 4 bytes, the least significant first
    by_lane = np.ascontiguousarray(by_word.transpose(0, 2, 1, 3)).reshape(-1, LANES, 4 * words)
    return np.unpackbits(by_lane, axis=2, bitorder="little")


def numbers(strings: U8, rows: int, bits: int) -> I64:
    """The codes in strings of bits, as [block, row, lane]."""
    fields = strings[:, :, : rows * bits].reshape(-1, LANES, rows, bits).astype(np.int64)
    return (fields << np.arange(bits)).sum(axis=3).transpose(0, 2, 1)


def unpack(part: U8, n: int, bits: int) -> I64:
    """The n codes of a payload's blocks, every bit that is none of an element's being 0."""
    insist(part.size == block_bytes(n, bits), "the blocks' size")
    whole = 64 * bits * (n // BLOCK)
    codes = numbers(lane_bits(part[:whole], bits), 32, bits).reshape(-1)
    q = n % BLOCK
    if q == 0:
        return codes
    rows = -(-q // LANES)
    strings = lane_bits(part[whole:], -(-rows * bits // 32))
    zeros(strings[:, :, rows * bits :], "what is left of a lane's last word")
    last = numbers(strings, rows, bits).reshape(-1)
    insist(not last[q:].any(), "bits of a lane past its last row")
    return np.concatenate([codes, last[:q]])
