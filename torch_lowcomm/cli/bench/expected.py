"""The expected result of an op: exact values, and how far each element may be from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_lowcomm._C import Codec

BLOCK = 4096  # elements over which the norm is taken if a codec states no error of an element
_ALLOWANCE = 1.25  # factor on such a norm: draws and the places of buckets differ from those of the measured op
# (unit of rounding to nearest, half the distance of the smallest numbers, the largest number).
_CASTS = {"fp16": (2**-11, 2**-25, 65504.0), "bf16": (2**-8, 2**-134, 3.38e38)}
_SCALARS = {"logbyte": 0.065, "log9": 0.032}  # relative, from 4e-4 to 2.6e3


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


def states_elements(codec: Codec) -> bool:
    """Whether a codec states an element's error: not one that rotates, chooses (`topk`) or follows a mean (`sign1`,
    `range=l2`).
    """
    name, options = _parts(codec)
    return not (
        name.startswith("gauss")
        or name in ("topk", "sign1")
        or options.get("rotate") == "1"
        or options.get("range") == "l2"
    )


def stated_error(codec: Codec, x: Tensor, slack: Bound | None = None) -> Bound:
    """Returns the bound on a codec's error on one message, x 1-D.

    * A grid codec has the bound of `lc.codec`: half a step, or a step for `qsgd` and the largest elements with `sym`.
    * A cast has its unit of rounding, a scalar codec its stated relative error.
    * A codec that states no error of an element has the norm, over every BLOCK elements, of the error of `Codec.roundtrip`
      on the same numbers, plus a quarter. For a tensor with fewer elements it is at least the norm of the numbers.

    With `slack`, how far the encoded numbers may be from x, in buckets that begin anywhere (the second encode of an
    all_reduce), the bound is on the error that is added.
    """
    x = x.float()
    if not states_elements(codec):
        error = norms(codec.roundtrip(x).double() - x.double())
        size = norms(x)
        if slack is not None:
            error = error * (1 + slack.values / size.clamp(min=1e-30))
            size = size + slack.values
        if x.numel() < BLOCK:
            error = torch.maximum(error, size)
        return Bound(_ALLOWANCE * error + 2**-20 * size, BLOCK)
    name, _ = _parts(codec)
    reach = x.abs().double() + (slack.values if slack is not None else 0)
    if name in _CASTS:
        unit, least, largest = _CASTS[name]
        return Bound(torch.maximum((unit * reach).clamp(min=least), reach - largest))
    if name in _SCALARS:
        return Bound((_SCALARS[name] * reach).clamp(min=4e-4))
    return Bound(_grid(codec, x, slack))


def _grid(codec: Codec, x: Tensor, slack: Bound | None) -> Tensor:
    """Returns half a step, or a step, of each element's bucket, plus rounding; FORMAT.md has the steps."""
    name, options = _parts(codec)
    family = name.rstrip("0123456789")
    short = 2**-7 if options.get("meta") == "bf16" else 0.0  # what bfloat16 may add to a scale, at most
    bucket = codec.bucket or max(x.numel(), 1)
    wide = x.double()
    low, high = _extremes(wide, bucket)
    if slack is not None:
        # No bucket, wherever it begins, reaches beyond the neighbours of the one that is counted from 0.
        _, off = _extremes(slack.values, bucket)
        high = F.max_pool1d((high + off)[None], 3, 1, 1)[0]
        low = -F.max_pool1d((off - low)[None], 3, 1, 1)[0]
    low, high = (t.repeat_interleave(bucket)[: x.numel()] for t in (low, high))
    largest = torch.maximum(low.abs(), high.abs())
    if family in ("sym", "mid"):
        levels = 2 ** (codec.bits - 1)
        step = largest / levels
        if slack is not None:  # sym's largest elements are up to a step beyond its last level
            bound = step * (1.0 if family == "sym" else 0.5) * (1 + short) + short / 2 * largest
        else:
            step = step.bfloat16().double() if short else step
            up = levels - {"sym": 1, "mid": 0.5}[family]
            down = levels - {"sym": 0, "mid": 0.5}[family]
            bound = torch.maximum(step / 2, torch.maximum(wide - up * step, -wide - down * step))
    else:
        step = (high - low + short * low.abs()) / (2**codec.bits - 1) * (1 + short)
        bound = step if family == "qsgd" else step / 2
    # Codes are made with 15 fraction bits, values decoded in fp32.
    return 1.001 * bound + 2**-20 * largest


def _extremes(x: Tensor, bucket: int) -> tuple[Tensor, Tensor]:
    pad = (0, -x.numel() % bucket)
    low = F.pad(x, pad, value=float("inf")).view(-1, bucket).amin(1)
    return low, F.pad(x, pad, value=float("-inf")).view(-1, bucket).amax(1)


def _parts(codec: Codec) -> tuple[str, dict[str, str]]:
    """Returns name and options: "sym4" and {"bucket": "1024"} for "sym4:bucket=1024"."""
    name, _, rest = codec.spec.partition(":")
    return name, dict(part.split("=", 1) for part in rest.split(",") if part)


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
