"""The other side of each comparison: payloads and values of the library. Nothing of the reader imports this."""

import logging

import numpy as np
import pytest
import torch

import torch_lowcomm as lc
from format_reader.decode import decode
from format_reader.refusal import F32, bits_of
from format_reader.spec import parse


def sample(n: int, seed: int = 0) -> torch.Tensor:
    """Numbers of many magnitudes, zeros of both signs and a subnormal among them."""
    made = torch.Generator().manual_seed(seed * 10007 + n)
    x = torch.randn(n, generator=made) * torch.exp2(torch.randint(-6, 7, (n,), generator=made).float())
    x[3::97], x[5::89], x[7::101] = 0.0, -0.0, 3e-40
    return x


def table_of(text: str) -> torch.Tensor | None:
    """Levels that are not evenly spaced, for the codec that has none of its own."""
    spec = parse(text)
    return torch.linspace(0, 1, 2**spec.bits) ** 1.5 if spec.name == "levels" else None


def written(text: str, x: torch.Tensor, seed: int = 5) -> bytes:
    """The library's payload of some elements."""
    quiet = logging.getLogger("torch_lowcomm")
    before = quiet.level
    quiet.setLevel(logging.ERROR)  # that 1 bit is coarse is not what is looked at here
    try:
        return lc.codec(text).encode(x, table=table_of(text), seed=seed, stream=3, step=2).numpy().tobytes()
    finally:
        quiet.setLevel(before)


def library(text: str, payload: bytes, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decodes a payload by the library."""
    sent = torch.from_numpy(np.frombuffer(payload, np.uint8).copy())
    return lc.Codec(text).decode(sent, n, dtype=dtype, table=table_of(text))


def reader(text: str, payload: bytes, n: int) -> F32:
    """Decodes a payload by the reader."""
    levels = table_of(text)
    return decode(text, payload, n, None if levels is None else levels.numpy())


def same(text: str, payload: bytes, n: int) -> F32:
    """Both decode a payload to the same numbers, bit for bit, except for the sign of a NaN that was rotated."""
    got, expected = reader(text, payload, n), library(text, payload, n).numpy()
    differ = bits_of(got) != bits_of(expected)
    if parse(text).rotated:
        differ &= ~(np.isnan(got) & np.isnan(expected))
    if differ.any():
        pytest.fail(f"{text}, {n} elements: {got} by the page, {expected} by the library")
    return got
