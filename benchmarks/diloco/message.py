"""The size of a round's message: bytes by the format, seconds on a link."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch_lowcomm as lc
from diloco.cases import Case

_BLOCK = 512  # a slice is of whole blocks and buckets
# Of Ethernet frames, whose rate a link's is, TCP's payload.
GOODPUT = 1448 / 1514


def payload_bytes(case: Case, shapes: Iterable[list[int]], ranks: int = 2) -> float:
    """Codes that a rank sends for one average of tensors of these shapes, the mean of all ranks, without frame headers.

    Each slice of a tensor goes out twice from each rank but one: as a contribution to the owner's sum, and as the sum from
    its owner. A matrix m x n with m·n > r·(m + n) is sent as factors of r·m and r·n elements.
    """
    codec, total = lc.codec(case.codec or "none"), 0
    unit = max(_BLOCK, int((case.codec or "").partition("bucket=")[2] or 0))
    for shape in shapes:
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
        r = case.rank or 0
        factored = 0 < r < min(rows, columns) and rows * columns > r * (rows + columns)
        for elements in (r * rows, r * columns) if factored else (rows * columns,):
            length = -(-elements // (unit * ranks)) * unit
            counts = [max(0, min(length, elements - rank * length)) for rank in range(ranks)]
            total += sum(codec.encoded_bytes(count) for count in counts)
    return total * 2 * (ranks - 1) / ranks


def link_seconds(payload: float, bits: float | None) -> float:
    """How long so many bytes take on a link of `bits` a second; 0 on one that is not shaped."""
    return 0.0 if bits is None else payload * 8 / (bits * GOODPUT)
