"""The page that describes the bytes is enough: a reader written from it alone reads what the library wrote, bit for bit."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from format_reader import decode, encoded_bytes, parse
from format_reader.by_library import library, reader, same, sample, written
from format_reader.casts import narrowed
from format_reader.decode import decode_exact

import torch_lowcomm as lc

SIZES = [0, 1, 15, 16, 17, 63, 511, 512, 513, 1537]
GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "codecs.txt"

EVEN = ["minmax", "qsgd", "lattice"]
ALL_BITS = [f"{name}{b}" for name in [*EVEN, "mid", "levels"] for b in range(1, 9)]
ALL_BITS += [f"sym{b}" for b in range(2, 9)] + ["sign1"]
BUCKETS = ["bucket=64", "bucket=128", "bucket=512", "bucket=1024", "bucket=tensor"]
CASTS = ["fp16", "bf16"]


def grid_texts():
    """Every grid codec with every bits, and each option with each codec that has it."""
    yield from (f"{name}:{bucket}" for name in ALL_BITS for bucket in BUCKETS)
    for name in ALL_BITS:
        if not name.startswith("lattice"):
            yield f"{name}:bucket=128,meta=bf16"
        if not name.startswith("levels"):
            yield f"{name}:bucket=512,rotate=1"
        if not name.startswith(("lattice", "levels")):
            yield f"{name}:bucket=1024,meta=bf16,rotate=1"
    yield from (f"{name}{b}:bucket=64,range=l2" for name in ("sym", "mid") for b in range(2, 9))
    yield from (f"{name}4:bucket=1024,meta=bf16,range=l2,rotate=1" for name in ("sym", "mid"))
    yield from (f"gauss{b}{options}" for b in range(1, 9) for options in ("", ":bucket=1024,meta=fp32,gain=1.13"))


def topk_texts():
    """Shares with which places are a bitmap, a list, and one element; every codec of values."""
    yield from (f"topk:keep={keep},values={v}" for keep in (0.001, 0.02, 0.2, 0.7, 1) for v in ("sym8", "minmax4"))
    values = ("sign1", "qsgd2", "lattice5", "mid1", "sym2")
    yield from (f"topk:keep=0.1,values={v}" for v in values)
    yield from (f"topk:chunk=256,keep=32,values={v}" for v in values)
    yield from (f"topk:chunk={c},values=minmax3" for c in ("64,keep=8", "64,keep=32", "1024,keep=8", "4096,keep=64"))


TEXTS = [*grid_texts(), *topk_texts(), "none", *CASTS, "logbyte", "log9"]


@pytest.mark.parametrize("name", sorted({parse(text).name for text in TEXTS}))
def test_the_reader_reads_what_the_library_wrote(name):
    for text in (text for text in TEXTS if parse(text).name == name):
        for n in SIZES:
            payload = written(text, sample(n))
            assert len(payload) == encoded_bytes(parse(text), n), f"{text}, {n} elements"
            same(text, payload, n)


@pytest.mark.parametrize("options", ["", ",meta=bf16"])
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (513, 1), (5, 3), (1, 511), (96, 16), (3, 600), (53, 29)])
def test_channels(shape, options):
    n = shape[0] * shape[1]
    for name in ALL_BITS:
        if name.startswith("levels") or (options and name.startswith("lattice")):
            continue
        same(text := f"{name}:axis=channel,C={shape[1]}{options}", written(text, sample(n).reshape(shape)), n)


@pytest.mark.parametrize("unit", [1, 16, 40, 100, 576, 896, 1024, 1600])
def test_units(unit):
    texts = (text for text in grid_texts() if "tensor" not in text and parse(text).name != "levels")
    for text in texts:
        for n in (0, unit, 3 * unit, 9 * unit):
            of_units = f"{text}{',' if ':' in text else ':'}unit={unit}"
            payload = written(of_units, sample(n))
            own = lc.Codec(of_units).spec  # which has no unit where its buckets end with them
            assert len(payload) == encoded_bytes(parse(own), n), f"{of_units}, {n} elements"
            same(own, payload, n)


def test_scales_of_every_magnitude():
    for power in (-149, -140, -127, -126, -100, 0, 60, 119):
        x = sample(600).sign() * torch.rand(600, generator=torch.Generator().manual_seed(1)) * 2.0**power
        for text in (t for t in grid_texts() if "delta" not in t and parse(t).bits in (1, 2, 3, 8)):
            same(text, written(text, x), 600)


@pytest.mark.parametrize("keep", ["keep=0.0001", "keep=0.3", "chunk=4096,keep=64", "chunk=65536,keep=32768"])
def test_topk_of_several_blocks_of_places(keep):
    text = f"topk:{keep},values=sym4"
    n = 3 * 65536 + 77
    same(text, written(text, sample(n)), n)


def test_what_is_sent_for_numbers_that_are_none():
    for text in (text for text in TEXTS if text not in ("none", "logbyte", "log9")):
        x = sample(1537)
        x[100], x[700], x[1400] = torch.nan, torch.inf, -torch.inf
        option = f"{text}{',' if ':' in text else ':'}nonfinite=poison"
        assert np.isnan(same(option, written(option, x), 1537)).any(), option


def test_logarithms_of_every_magnitude():
    exponents = torch.arange(-149, 128, dtype=torch.float64)
    x = torch.cat([torch.exp2(exponents) * f for f in (1, 1.1, 1.5, 1.9)]).float()
    x = torch.cat([x, -x, torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf])])
    for name in ("logbyte", "log9"):
        same(name, written(name, x), x.numel())
    for e, n in [(64, "logbyte"), (128, "log9")]:
        assert reader(n, written(n, torch.ones(1)), 1) == 1, f"code {e} is 1"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_elements_of_16_bits(dtype):
    to = str(dtype).removeprefix("torch.")
    for text in ["minmax4", "sym8:meta=bf16", "gauss3", "levels2", "topk:keep=0.1", "topk:chunk=64,keep=16", *CASTS]:
        x = sample(1537).to(dtype)
        payload = written(text, x)
        got = same(text, payload, 1537)
        expected = library(text, payload, 1537, dtype).view(torch.uint16).numpy()
        np.testing.assert_array_equal(narrowed(got, to, saturate=text in CASTS), expected, err_msg=text)


def test_exact_elements_of_every_size():
    for dtype in (torch.uint8, torch.int16, torch.bfloat16, torch.float64, torch.int64):
        x = (sample(513) * 100).to(dtype).abs()
        payload = np.frombuffer(written("none", x), np.uint8)
        assert payload.size == encoded_bytes(parse("none"), 513, x.itemsize)
        assert decode_exact(payload, 513, x.itemsize).tobytes() == x.view(torch.uint8).numpy().tobytes()


def test_casts_into_a_narrower_type_stay_finite():
    x = torch.tensor([1e6, -1e6, 3.4e38, 65519.0, 65520.0, 1e-8, -0.0])
    for text in CASTS:
        payload = written(text, x)
        got = same(text, payload, x.numel())
        expected = library(text, payload, x.numel(), torch.float16).view(torch.uint16).numpy()
        np.testing.assert_array_equal(narrowed(got, "float16", saturate=True), expected, err_msg=text)


def golden():
    """The golden vectors that have payload and values in full: (text, payload, values)."""
    for words in (line.split() for line in GOLDEN.read_text().splitlines()):
        if len(words) == 7:
            yield words[0], words[3:5], bytes.fromhex(words[5]), bytes.fromhex(words[6])


def test_golden_vectors():
    read = 0
    for text, hashes, payload, values in golden():
        assert [hashlib.sha256(part).hexdigest() for part in (payload, values)] == hashes, text
        assert decode(text, payload, len(values) // 4).tobytes() == values, text
        read += 1
    assert read > 40
