"""How far a result may be from the exact one."""

import torch
from torch import Tensor

from torch_lowcomm._C import Codec


def codec_error(codec: Codec, x: Tensor) -> float:
    """Returns ||decoded - x|| / ||x|| of a round trip."""
    x = x.float()
    return float((codec.roundtrip(x) - x).norm() / x.norm())


def count_wrong(result: Tensor, exact: Tensor, *, roundings: int, coded: float | None) -> int:
    """Returns how many elements of a result are wrong; NaN always is.

    Args:
        result: What an op returned.
        exact: The exact result.
        roundings: How often an element may have been rounded to the result's dtype.
        coded: The codec's error; None for an exact op.

    Returns:
        For an exact op the elements that are not within roundings x eps x the largest exact one. For a coded op all elements
        if ||result - exact|| / ||exact|| is above 2 x coded + roundings x eps, else 0.
    """
    exact = exact.double()
    error = result.double() - exact
    rounded = roundings * torch.finfo(result.dtype).eps if result.is_floating_point() else 0.0
    if coded is None:
        return int((~(error.abs() <= rounded * exact.abs().max())).sum())
    return 0 if error.norm() <= (2 * coded + rounded) * exact.norm() else error.numel()
