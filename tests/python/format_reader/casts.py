"""Casts: elements in a narrower type, and how decoded values go into one."""

import numpy as np

from format_reader.refusal import F32, U8, bits_of, float_of, insist, up64, zeros
from format_reader.spec import Spec

NAN = {"fp16": 0x7E00, "bf16": 0x7FC0}


def cast_bytes(n: int) -> int:
    """The size of a payload."""
    return up64(2 * n)


def widen(name: str, codes: np.ndarray) -> F32:
    """Codes as float32, exactly."""
    if name == "fp16":
        return codes.view(np.float16).astype(np.float32)
    return float_of(codes.astype(np.uint32) << np.uint32(16))


def decode_cast(spec: Spec, payload: U8, n: int) -> F32:
    """The n elements of a payload whose size has been checked."""
    zeros(payload[2 * n :], "the padding")
    codes = payload[: 2 * n].view("<u2")
    decoded = widen(spec.name, codes)
    accepted = np.isfinite(decoded)
    if spec.poison:
        accepted |= codes == NAN[spec.name]
    insist(bool(accepted.all()), "a code that is no finite number")
    return decoded


def to_bfloat16(values: F32) -> np.ndarray:
    """The nearest bfloat16 numbers, ties to even, as their bits; NaN stays NaN."""
    bits = bits_of(values).astype(np.uint64)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, nearest).astype(np.uint16)


def narrowed(values: F32, to: str, saturate: bool) -> np.ndarray:
    """The bits of values in float16 or bfloat16; with `saturate` finite ones stay finite."""
    if to == "float16":
        with np.errstate(over="ignore"):
            codes, infinity = values.astype(np.float16).view(np.uint16), 0x7C00
    else:
        codes, infinity = to_bfloat16(values), 0x7F80
    if saturate:
        codes = codes - (np.isfinite(values) & ((codes & 0x7FFF) == infinity)).astype(np.uint16)
    return codes
