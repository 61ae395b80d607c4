"""What the bench counts as wrong: exact results by elements, coded ones by their relative error."""

import itertools

import pytest
import torch

import torch_lowcomm as lc
from torch_lowcomm.cli.bench.expected import count_wrong

CODECS = [f"{family}{bits}" for family in ("minmax", "qsgd", "lattice", "sym", "mid") for bits in (2, 4, 8)]
CODECS += [
    "sym3:bucket=tensor",
    "sym4:meta=bf16",
    "minmax4:rotate=1",
    "fp16",
    "bf16",
    "logbyte",
    "log9",
    "gauss2",
    "gauss4",
]
CODECS += ["topk", "topk:keep=0.01", "sign1", "sym4:range=l2"]


def data(n, seed):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def all_reduced(codec, inputs):
    """A coded all_reduce, its one slice summed by rank 0."""
    sent = [codec.roundtrip(x.float(), seed=rank) for rank, x in enumerate(inputs[1:])]
    return codec.roundtrip(inputs[0].float() + sum(sent), seed=9).to(inputs[0].dtype)


@pytest.mark.parametrize("spec", CODECS)
def test_a_coded_all_reduce_is_right_and_nan_is_not(spec):
    codec = lc.codec(spec)
    for n, size, dtype in itertools.product((2, 64, 4096, 10_000), (2, 8), (torch.float32, torch.bfloat16)):
        inputs = [data(n, seed).to(dtype) for seed in range(size)]
        result, exact = all_reduced(codec, inputs), sum(x.double() for x in inputs)
        assert count_wrong(result, exact, roundings=size, codec=codec) == 0, (n, size, dtype)
        result[1] = float("nan")
        assert count_wrong(result, exact, roundings=size, codec=codec) == n


@pytest.mark.parametrize("spec", ["minmax4", "qsgd8", "lattice4", "sym4", "mid8", "bf16", "logbyte", "gauss4"])
@pytest.mark.parametrize("size", [2, 8])
def test_a_coded_all_reduce_without_a_rank_is_wrong(spec, size):
    codec = lc.codec(spec)
    inputs = [data(10_000, seed) for seed in range(size)]
    result = all_reduced(codec, inputs[:-1])
    assert count_wrong(result, sum(x.double() for x in inputs), roundings=size, codec=codec) == 10_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32])
def test_elements_of_an_exact_result_are_wrong_one_by_one(dtype):
    parts = [data(1000, seed).mul(8).to(dtype) for seed in range(3)]
    exact = sum(x.double() for x in parts)
    for first in range(3):
        result = parts[first] + parts[first - 1] + parts[first - 2]
        assert count_wrong(result, exact, roundings=3, codec=None) == 0
    result[5] += 1 if dtype != torch.bfloat16 else 4
    result[7] += 2 if dtype != torch.bfloat16 else 4
    assert count_wrong(result, exact, roundings=3, codec=None) == 2


def test_what_is_moved_must_be_the_same():
    x = data(1000, 1)
    result = x.clone()
    assert count_wrong(result, x, roundings=0, codec=None) == 0
    result.view(torch.int32)[3] ^= 1
    result[9] = float("nan")
    assert count_wrong(result, x, roundings=0, codec=None) == 2
