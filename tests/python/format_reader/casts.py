"""Casts: elements in a narrower type, and how decoded values go into one."""

import numpy as np

from format_reader.refusal import F32, U8, bits_of, float_of, insist, up64, zeros
from format_reader.spec import Spec

ITEM = {"fp16": 2, "bf16": 2, "fp8e4m3": 1}
NAN = {"fp16": 0x7E00, "bf16": 0x7FC0, "fp8e4m3": 0x7F}


def cast_bytes(spec: Spec, n: int) -> int:
    """The size of a payload."""
    return up64(n * ITEM[spec.name])


def small_floats() -> F32:
    """The 256 numbers of fp8e4m3, by its definition."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, normal)
    magnitude[(code & 127) == 127] = np.nan
    return np.where(code & 128, -magnitude, magnitude).astype(np.float32)


def widen(name: str, codes: np.ndarray) -> F32:
    """Codes as float32, exactly."""
    match name:
        case "fp16":
            return codes.view(np.float16).astype(np.float32)
        case "bf16":
            return float_of(codes.astype(np.uint32) << np.uint32(16))
        case _:
            return small_floats()[codes]


def decode_cast(spec: Spec, payload: U8, n: int) -> F32:
    """The n elements of a payload whose size has been checked."""
    used = n * ITEM[spec.name]
    zeros(payload[used:], "the padding")
    codes = payload[:used].view("<u2") if ITEM[spec.name] == 2 else payload[:used]
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
