"""Units: the elements of a message that are coded without regard to all others.

A decoded element depends on all elements that share its scale or its rotation. If these belonged to later tokens, a causal
model would learn to read them: its training loss would fall below that of exact messages, and the model would be worthless.
"""

import functools
import math
from collections.abc import Sequence

from torch_lowcomm import _C

UNITS = ("token", "sample", "message")


def expect_unit(unit: str | None) -> None:
    """Refuses what is no unit."""
    if unit not in (None, *UNITS):
        raise ValueError(f"unit: expected {', '.join(map(repr, UNITS))} or None, got {unit!r}")


def unit_of(codec: str, shape: Sequence[int], unit: str | None, *, activations: bool) -> int:
    """The elements of a unit of a tensor, [batch, time, width] or [batch, ...], the same on both sides of a boundary; 0 where the
    whole tensor is one unit. `unit` is as `Stage` has it.

    A codec that makes each element of activations depend on all others is a ValueError, where they are [batch, time, width] or a
    unit was asked for.
    """
    if not codec or unit == "message" or len(shape) < 2:
        return 0
    if what := _C.ties_all(codec):
        if activations and (len(shape) == 3 or unit is not None):
            raise ValueError(
                f"codec {codec!r}: expected one whose scales belong to a token of activations [batch, time, width], got {what}: "
                f'a decoded token would tell of later ones, which a causal model learns to read; unit="message" allows it'
            )
        return 0
    return shape[-1] if unit == "token" or (unit is None and len(shape) == 3) else math.prod(shape[1:])


def is_shorter(codec: str, elements: int, itemsize: int) -> bool:
    """Whether coded units take fewer bytes than exact ones: of a few elements they do not, for a unit is filled up to 16.
    Units of 0 elements are whole messages, which are coded whatever their size.
    """
    return elements == 0 or elements >= _LARGE or _coded(codec, elements) < _MANY * elements * itemsize


_LARGE = 64  # elements of units that any codec makes shorter
_MANY = 64  # units over which what fills a payload up is nothing


@functools.cache
def _coded(codec: str, elements: int) -> int:
    """Bytes of `_MANY` units."""
    whole = _C.Codec(codec)
    if whole.spec.split(":")[0] in ("none", "fp16", "bf16", "logbyte", "log9"):
        return whole.encoded_bytes(_MANY * elements)
    return _C.Codec(f"{codec}{',' if ':' in codec else ':'}unit={elements}").encoded_bytes(_MANY * elements)
