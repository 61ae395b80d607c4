"""Bounds on a codec's error, from its stated error."""

from __future__ import annotations

import dataclasses

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
    """Whether a codec states the error of a single element.

    Codecs that rotate, choose (`topk`), or follow a mean (`sign1`, `range=l2`) do not.
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
    """Returns minimum and maximum of every bucket."""
    pad = (0, -x.numel() % bucket)
    low = F.pad(x, pad, value=float("inf")).view(-1, bucket).amin(1)
    return low, F.pad(x, pad, value=float("-inf")).view(-1, bucket).amax(1)


def _parts(codec: Codec) -> tuple[str, dict[str, str]]:
    """Returns name and options: "sym4" and {"bucket": "1024"} for "sym4:bucket=1024"."""
    name, _, rest = codec.spec.partition(":")
    return name, dict(part.split("=", 1) for part in rest.split(",") if part)
