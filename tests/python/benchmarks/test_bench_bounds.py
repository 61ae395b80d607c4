"""The bounds to which the bench holds results: a codec's stated error, no less than what it errs and little more."""

import itertools

import pytest
import torch
from collective_cases import UNIT

import torch_lowcomm as lc
from torch_lowcomm.cli.bench.expected import BLOCK, moved, norms, reduced, stated_error

CODECS = [f"{family}{bits}" for family in ("minmax", "qsgd", "lattice", "sym", "mid") for bits in (2, 4, 8)]
CODECS += ["minmax4:bucket=64", "sym3:bucket=tensor", "minmax4:meta=bf16", "qsgd4:meta=bf16", "sym4:meta=bf16"]
CODECS += ["mid8:meta=bf16", "fp16", "bf16", "logbyte", "log9", "gauss2", "gauss4"]
CODECS += ["minmax4:rotate=1", "qsgd8:rotate=1"]
CODECS += ["topk", "topk:keep=0.01", "sign1", "sym4:range=l2"]


def data(n, seed, scale=1.0, shift=0.0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)) * scale + shift


def coded(codec, x, seed=5):
    return codec.roundtrip(x, seed=seed, stream=1 << 16, step=3)


@pytest.mark.parametrize("spec", CODECS)
@pytest.mark.parametrize("n", [1, 63, 1500, 20_000])
def test_a_codec_errs_within_its_bound_and_the_bound_is_no_idle_one(spec, n):
    codec = lc.codec(spec)
    for x in (data(n, 1), data(n, 2, scale=1e-3), data(n, 3, shift=5.0)):
        bound = stated_error(codec, x)
        error = coded(codec, x).double() - x.double()
        assert bound.outside(error) == 0, spec
        spoilt = error.clone()
        spoilt[n // 2] += 3 * bound.values.max() + 1e-6
        assert bound.outside(spoilt) == min(BLOCK, n - n // 2 // BLOCK * BLOCK)
        spoilt[n // 2] = float("nan")
        assert bound.outside(spoilt) > 0


@pytest.mark.parametrize("spec", CODECS)
@pytest.mark.parametrize("at", [0, 64, 777])
def test_a_second_encode_errs_within_the_bound_of_what_is_known_of_its_input(spec, at):
    """The input is known within a slack only, and its buckets begin somewhere."""
    codec = lc.codec(spec)
    x = data(12_000, 7)
    slack = stated_error(codec, x)
    off = coded(codec, x) - x
    bound = stated_error(codec, x, slack=slack)
    given = x + off
    sent = torch.cat([coded(codec, part) for part in (given[:at], given[at:]) if part.numel()])
    assert bound.outside(sent.double() - given.double()) == 0, spec


def all_reduced(codec, inputs, cuts):
    """Returns the result of a direct all_reduce: slices are summed at their owners from coded contributions, and coded again."""
    out = torch.empty_like(inputs[0])
    for owner, (start, end) in enumerate(itertools.pairwise(cuts)):
        total = None
        for rank, x in enumerate(inputs):
            part = x[start:end]
            part = part.float() if rank == owner else coded(codec, part, seed=rank).float()
            total = part if total is None else total + part
        out[start:end] = coded(codec, total, seed=9).to(out.dtype)
    return out


@pytest.mark.parametrize("spec", ["sym4:bucket=1024", "qsgd8", "minmax2", "mid4", "bf16", "gauss4", "topk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_a_coded_all_reduce_is_within_bounds_wherever_its_slices_are_cut(spec, dtype, size):
    codec = lc.codec(spec)
    n = 10_000
    inputs = [data(n, seed).to(dtype) for seed in range(size)]
    expected = reduced(inputs, "sum", codec, own=None, again=True)
    for first in (n // size, 3072, 4100):
        cuts = [0, *(first + i * (n - first) // (size - 1) for i in range(size))]
        result = all_reduced(codec, inputs, cuts)
        assert expected.wrong(result) == 0
        result[5000] = result[5000] + 1000
        assert expected.wrong(result) >= 1
    assert expected.wrong(sum(x.float() for x in inputs).to(dtype)) == 0, "exact is within every bound"
    assert expected.wrong(torch.zeros(n, dtype=dtype)) > 0 or spec in ("minmax2", "topk", "gauss4")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_exact_sums_have_the_same_bits_at_two_ranks_and_a_bound_beyond(dtype):
    inputs = [data(1000, seed).to(dtype) for seed in range(3)]
    pair = reduced(inputs[:2], "sum", None, own=None, again=False)
    total = inputs[0] + inputs[1]
    assert pair.bound is None and pair.wrong(total) == 0
    total.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])[3] ^= 1
    assert pair.wrong(total) == 1

    trio = reduced(inputs, "sum", None, own=None, again=False)
    for order in (0, 1, 2):
        total = inputs[order] + inputs[order - 1] + inputs[order - 2]
        assert trio.wrong(total) == 0
    magnitude = sum(x.double().abs() for x in inputs)
    assert (trio.bound.values <= 4.1 * UNIT[dtype] * magnitude + torch.finfo(dtype).tiny).all()
    assert trio.wrong((total.double() + 8 * UNIT[dtype] * magnitude).to(dtype)) == 1000


def test_what_is_moved_exact_has_the_same_bits():
    x = torch.tensor([0.0, -0.0, float("nan"), 1.0])
    assert moved(x, None).wrong(x.clone()) == 0
    assert moved(x, None).wrong(torch.tensor([-0.0, -0.0, float("nan"), 1.0])) == 1


def test_norms_are_of_blocks():
    x = torch.ones(BLOCK + 4)
    assert norms(x).tolist() == [BLOCK**0.5, 2.0]
