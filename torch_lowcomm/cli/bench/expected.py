"""The expected result of an op: exact values, and how far each element may be from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_lowcomm._C import Codec

BLOCK = 4096  # elements over which the norm of a codec's error is taken
_ALLOWANCE = 1.25  # factor on such a norm: draws and the places of buckets differ from those of the measured op


@dataclasses.dataclass(frozen=True)
class Bound:
    """Upper bounds on |error|: of every element (block 1), or on its Euclidean norm over every `block` elements."""

    values: Tensor
    block: int = 1

    def __add__(self, other: Bound) -> Bound:
        return dataclasses.replace(self, values=self.values + other.values)

    def outside(self, error: Tensor) -> int:
        """Returns how many elements are out of bounds: all of a block whose norm is, and every NaN."""
        if self.block == 1:
            return int((~(error.abs() <= self.values)).sum())
        within = norms(error) <= self.values
        counts = torch.full((len(within),), BLOCK)
        if len(within):
            counts[-1] = error.numel() - BLOCK * (len(within) - 1)
        return int(counts[~within].sum())


def norms(x: Tensor) -> Tensor:
    """Returns Euclidean norms over blocks of BLOCK elements in float64; the last block may be short."""
    padded = F.pad(x.double(), (0, -x.numel() % BLOCK))
    return padded.view(-1, BLOCK).norm(dim=1)


def stated_error(codec: Codec, x: Tensor, slack: Bound | None = None) -> Bound:
    """Returns the bound on a codec's error on one message, x 1-D.

    It is the norm of the error of a round trip over every BLOCK elements, plus a quarter; of fewer elements at least their norm.
    With `slack`, how far the encoded numbers may be from x, it is on the error that the second encode of an all_reduce adds.
    """
    x = x.float()
    error, size = norms(codec.roundtrip(x).double() - x.double()), norms(x)
    if slack is not None:
        more = slack.values if slack.block == BLOCK else norms(slack.values)
        error = error * (1 + more / size.clamp(min=1e-30))
        size = size + more
    if x.numel() < BLOCK:
        error = torch.maximum(error, size)
    return Bound(_ALLOWANCE * error + 2**-20 * size, BLOCK)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclasses.dataclass(frozen=True)
class ExpectedElements:
    """The exact elements, 1-D, and the bound on the difference from them; without a bound the bits must be equal."""

    exact: Tensor
    bound: Bound | None = None

    def wrong(self, result: Tensor) -> int:
        """Returns how many elements of a result, 1-D, are wrong; NaN is wrong where there is a bound."""
        if self.bound is None:
            view = _BITS[result.element_size()]
            return int((result.view(view) != self.exact.to(result.dtype).view(view)).sum())
        return self.bound.outside(result.double() - self.exact.double())


def moved(x: Tensor, codec: Codec | None) -> ExpectedElements:
    """Expects elements that are sent as one message without arithmetic: the same bits, or within the codec's bound."""
    if codec is None:
        return ExpectedElements(x)
    return ExpectedElements(x, _widened(stated_error(codec, x), _rounding(x)))


def reduced(
    inputs: Iterable[Tensor], redop: str, codec: Codec | None, *, own: int | None, again: bool
) -> ExpectedElements:
    """Expects elements that are reduced over the ranks, of which `inputs` has the contributions in rank order.

    * Exact: the same bits if the order of operations does not matter (two ranks, integers, min, max). Else the bound is
      (W-1)·u·sum |x|, where u is the dtype's unit of rounding; for a product its magnitude takes the place of the sum. An
      average rounds once more.
    * Coded (sums and averages): the bound is the sum of the codec's errors on the contributions, but for that of the rank
      `own`, which owns the result, plus that of a float32 sum; `again` where the result is coded once more (all_reduce).
    """
    parts = list(inputs)
    ranks, dtype = len(parts), parts[0].dtype
    if codec is None and (ranks <= 2 or not dtype.is_floating_point or redop in ("min", "max")):
        return ExpectedElements(_in_dtype(parts, redop))
    wide = torch.stack([part.double() for part in parts])
    exact = wide.prod(0) if redop == "prod" else wide.sum(0)
    magnitude = exact.abs() if redop == "prod" else wide.abs().sum(0)
    unit = torch.finfo(dtype).eps / 2
    roundings = ranks - 1 + (redop == "avg")
    # The float64 reference may itself be off by this much: the factor of 2.
    slack = roundings * unit * magnitude * (2 if dtype == torch.float64 else 1.01) + torch.finfo(dtype).tiny
    share = ranks if redop == "avg" else 1
    exact, slack = exact / share, slack / share
    if codec is None:
        return ExpectedElements(exact, Bound(slack))
    errors = [stated_error(codec, part) for rank, part in enumerate(parts) if rank != own]
    bound = errors[0]
    for error in errors[1:]:
        bound = bound + error
    slack = slack + magnitude / share * 2**-22 * ranks  # sums of decoded values, in fp32
    bound = _widened(dataclasses.replace(bound, values=bound.values / share), slack)
    if again:
        bound = _widened(bound + stated_error(codec, exact, slack=bound), _rounding(exact.to(dtype)))
    return ExpectedElements(exact, bound)


def _in_dtype(parts: list[Tensor], redop: str) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        if redop in ("sum", "avg"):
            total = total + part
        elif redop == "prod":
            total = total * part
        else:
            total = torch.minimum(total, part) if redop == "min" else torch.maximum(total, part)
    return total / len(parts) if redop == "avg" else total


def _rounding(x: Tensor) -> Tensor:
    """Returns the rounding error of storing a decoded value in x's dtype."""
    return x.double().abs() * torch.finfo(x.dtype).eps


def _widened(bound: Bound, by: Tensor) -> Bound:
    """Returns the bound, enlarged by another error of every element."""
    return dataclasses.replace(bound, values=bound.values + (by if bound.block == 1 else norms(by)))
