"""logbyte and log9: sign and logarithm."""

import math

import numpy as np

from format_reader.refusal import F32, QUIET_NAN, U8, up64, zeros
from format_reader.spec import Spec

BITS = {"logbyte": 8, "log9": 9}


def scalar_bytes(spec: Spec, n: int) -> int:
    """The size of a payload."""
    return up64(-(-BITS[spec.name] * n // 8))


def decoded_values(name: str) -> F32:
    """Returns the value of every code."""
    bits = BITS[name]
    middle, per = (64, 8) if name == "logbyte" else (128, 16)
    sign = 1 << (bits - 1)
    above = np.array([0.0] + [math.exp((e - middle) / per) for e in range(1, sign)], np.float32)
    table = np.concatenate([above, -above])
    table[sign : sign + 1] = np.array([QUIET_NAN], np.uint32).view(np.float32)
    return table


def decode_scalars(spec: Spec, payload: U8, n: int) -> F32:
    """The n elements of a payload whose size has been checked."""
    bits = BITS[spec.name]
    strings = np.unpackbits(payload, bitorder="little")
    zeros(strings[bits * n :], "the bits past the last element")
    codes = (strings[: bits * n].reshape(n, bits).astype(np.int64) << np.arange(bits)).sum(axis=1)
    return decoded_values(spec.name)[codes]
