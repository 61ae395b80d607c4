"""The grid codecs beyond minmax and qsgd, seen from Python."""

import pytest
import torch

import torch_lowcomm as lc

TEXTS = [
    "dither4:bucket=64",
    "lattice4:bucket=512",
    "lattice8:bucket=64,delta=0.25",
    "qsgd4:bucket=128,delta=1",
    "sym4:bucket=64",
    "sym2:bucket=1024,range=l2",
    "mid3:bucket=64",
    "sign1:bucket=64",
    "tern:bucket=128",
    "minmax4:bucket=128,meta=bf16",
    "sym4:bucket=128,meta=bf16",
    "mid2:bucket=64,meta=bf16,range=l2,nonfinite=poison",
    "qsgd4:bucket=512,meta=bf16,rotate=1",
    "sym4:bucket=1024,rotate=1",
    "gauss2:bucket=512",
    "gauss4:bucket=1024,meta=fp32,gain=1.011",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_size_and_determinism(text):
    c = lc.codec(text)
    assert c.spec == text
    x = torch.randn(5, 401, generator=torch.Generator().manual_seed(1)).clamp(-3, 3)
    payload = c.encode(x, seed=3, stream=2, step=1)
    assert payload.numel() == c.encoded_bytes(x.numel()) < x.numel() * 4 / 2
    assert torch.equal(payload, c.encode(x, seed=3, stream=2, step=1))
    y = c.decode(payload, x.numel()).view_as(x)
    assert torch.equal(y, c.roundtrip(x, seed=3, stream=2, step=1))
    assert (y - x).norm() < x.norm()


def test_levels():
    x = torch.tensor([-4.0, -1.9, -0.5, 0.0, 0.5, 1.9, 2.1, 4.0])
    assert lc.codec("sym2").roundtrip(x).tolist() == [-4, -2, 0, 0, 0, 2, 2, 2]
    assert lc.codec("mid2").roundtrip(x).tolist() == [-3, -1, -1, 1, 1, 1, 3, 3]
    assert lc.codec("tern").roundtrip(x).tolist() == [-4, 0, 0, 0, 0, 0, 4, 4]
    assert lc.codec("sign1").roundtrip(torch.tensor([-1.0, 3.0])).tolist() == [-2, 2]


def test_bf16_metadata_is_half():
    assert lc.codec("minmax4:bucket=64").encoded_bytes(4096) == 512 + 2048
    assert lc.codec("minmax4:bucket=64,meta=bf16").encoded_bytes(4096) == 256 + 2048
    assert lc.codec("sym4:bucket=64,meta=bf16").encoded_bytes(4096) == 128 + 2048


@pytest.mark.parametrize(("text", "error"), [("gauss2", 0.341), ("gauss4", 0.098), ("minmax4:bucket=512", 0.117)])
def test_a_rotation_makes_outliers_harmless(text, error):
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(1))
    plain = lc.codec(text)
    assert (plain.roundtrip(x) - x).norm() / x.norm() == pytest.approx(error, rel=0.03)
    x[::4096] = 20.0
    rotated = plain if text.startswith("gauss") else lc.codec(text + ",rotate=1")
    assert (rotated.roundtrip(x) - x).norm() / x.norm() < 1.2 * error


def test_levels_of_a_table():
    c = lc.codec("levels2:bucket=64")
    table = torch.tensor([0.0, 0.125, 0.5, 1.0])
    x = torch.tensor([0.0, 0.5, 0.6, 1.2, 2.4, 2.6, 5.9, 6.1, 8.0])
    expected = [0.0, 0.0, 1.0, 1.0, 1.0, 4.0, 4.0, 8.0, 8.0]
    payload = c.encode(x, table=table)
    assert payload.numel() == c.encoded_bytes(9)
    assert c.decode(payload, 9, table=table).tolist() == expected
    assert c.roundtrip(x, table=table).tolist() == expected
    for call in (lambda: c.encode(x), lambda: c.decode(payload, 9), lambda: c.roundtrip(x)):
        with pytest.raises(ValueError, match="levels2:bucket=64: expected a level table, got none"):
            call()
    with pytest.raises(ValueError, match="expected 4 values, got 2"):
        c.encode(x, table=torch.tensor([0.0, 1.0]))
    with pytest.raises(ValueError, match="value 2: expected one above 0.5"):
        c.encode(x, table=torch.tensor([0.0, 0.5, 0.5, 1.0]))
    with pytest.raises(ValueError, match="expected no level table, got one"):
        lc.codec("minmax2").encode(x, table=table)
    with pytest.raises(TypeError, match="expected a 1-D float32 tensor, got 1-D Double"):
        c.encode(x, table=table.double())
    with pytest.raises(ValueError, match="layout: expected codecs that need no level table, got 'levels2:bucket=64'"):
        lc._C.Layout([(0, 9, c.spec)])


@pytest.mark.parametrize("family", ["minmax4", "qsgd8", "lattice4", "sym4", "sign1"])
def test_policies_for_what_is_not_finite(family):
    x = torch.ones(200)
    x[3], x[70] = -torch.inf, torch.nan
    with pytest.raises(ValueError, match="element 3"):
        lc.codec(f"{family}:bucket=64").encode(x)
    saturated = lc.codec(f"{family}:bucket=64,nonfinite=saturate").roundtrip(x)
    assert saturated.isfinite().all()
    assert saturated[3] < 0
    poisoned = lc.codec(f"{family}:bucket=64,nonfinite=poison").roundtrip(x)
    assert poisoned[:128].isnan().all()
    assert poisoned[128:].isfinite().all()


def test_a_range_that_delta_does_not_span():
    with pytest.raises(ValueError, match="at most 3.0"):
        lc.codec("qsgd2:bucket=64,delta=1").encode(torch.tensor([0.0, 3.5]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sym1", ["bits", "2...8"]),
        ("tern2", ["name", "tern"]),
        ("minmax4:range=l2", ["range", "sym or mid"]),
        ("lattice4:meta=bf16", ["meta", "fp32"]),
        ("sym4:delta=1", ["delta", "qsgd or lattice"]),
        ("minmax4:nonfinite=ignore", ["nonfinite", "saturate"]),
    ],
)
def test_options_that_do_not_fit_are_named(text, words):
    with pytest.raises(ValueError) as error:
        lc.codec(text)
    for word in words:
        assert word in str(error.value)
