"""Two acts of every part of the reader: to refuse, and to insist on zeros."""

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]

QUIET_NAN = 0x7FC00000


class Refusal(ValueError):
    """The bytes are none that a writer of the format makes."""


def insist(holds: bool, what: str) -> None:
    """Refuse where the page says that a reader does."""
    if not holds:
        raise Refusal(what)


def zeros(part: U8, what: str) -> None:
    """Padding is 0, and nothing else is accepted."""
    insist(not part.any(), f"{what}: expected zeros")


def up64(size: int) -> int:
    """A size rounded up to a multiple of 64."""
    return -(-size // 64) * 64


def float_of(bits: U32) -> F32:
    """The float32 numbers of bit patterns."""
    return np.ascontiguousarray(bits, dtype=np.uint32).view(np.float32)


def bits_of(values: F32) -> U32:
    """The bit patterns of float32 numbers."""
    return np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
