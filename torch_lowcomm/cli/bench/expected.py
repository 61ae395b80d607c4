"""How far a result may be from the exact one."""

import sys

import torch
from torch import Tensor

from torch_lowcomm._C import Codec

FEW = 4096  # elements: fewer may add up to next to nothing, and their relative error is any


def count_wrong(result: Tensor, exact: Tensor, *, roundings: int, codec: Codec | None) -> int:
    """Returns how many elements of a result are wrong; NaN always is.

    Args:
        result: What an op returned.
        exact: The exact result.
        roundings: How often an element may have been rounded to the result's dtype.
        codec: The codec of the op, if any.

    Returns:
        For an exact op the elements that are not within roundings x eps x the largest exact one. For a coded op all elements
        or none: the relative error may be 2 x that of a round trip of the exact result + roundings x eps, and that of few
        elements any number.
    """
    exact = exact.double()
    error = result.double() - exact
    rounded = roundings * torch.finfo(result.dtype).eps if result.is_floating_point() else 0.0
    if codec is None:
        return int((~(error.abs() <= rounded * exact.abs().max())).sum())
    limit = sys.float_info.max
    if error.numel() >= FEW:
        limit = 2 * float((codec.roundtrip(exact.float()) - exact).norm()) + rounded * float(exact.norm())
    return 0 if error.norm() <= limit else error.numel()
