"""Units: a tensor whose buckets and rotations begin anew at each of them, in parts that are tensors of their own."""

from dataclasses import replace

import numpy as np

from format_reader.grid import decode_grid, grid_bytes
from format_reader.refusal import F32, U8, insist
from format_reader.spec import Spec


def parts(spec: Spec) -> list[tuple[int, Spec]]:
    """Elements of a unit in each part, with the codec of the part."""
    left = 16 * -(-spec.unit // 16)
    whole = left // spec.bucket * spec.bucket
    found = [(whole, spec.bucket)] if whole else []
    left -= whole
    while left:
        size = 2 ** (left.bit_length() - 1)
        found.append((size, size))
        left -= size
    return [(size, replace(spec, bucket=bucket, unit=0)) for size, bucket in found]


def unit_bytes(spec: Spec, n: int) -> int:
    """The size of a payload."""
    insist(n % spec.unit == 0, f"{n} elements in units of {spec.unit}")
    return sum(grid_bytes(codec, n // spec.unit * size) for size, codec in parts(spec))


def decode_units(spec: Spec, payload: U8, n: int) -> F32:
    """The n elements of a payload whose size has been checked."""
    units, at, rows = n // spec.unit, 0, []
    for size, codec in parts(spec):
        end = at + grid_bytes(codec, units * size)
        rows.append(decode_grid(codec, payload[at:end], units * size, units=True).reshape(units, size))
        at = end
    return np.ascontiguousarray(np.concatenate(rows, axis=1)[:, : spec.unit]).reshape(-1)
