"""The codecs beyond none, minmax and qsgd, seen from Python."""

import pytest
import torch

import torch_lowcomm as lc


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


@pytest.mark.parametrize("shape", [(5, 0), (0, 5), (0,), (3, 0, 70000), (0, 0)])
@pytest.mark.parametrize("text", ["sym8:axis=channel", "minmax4:axis=channel,C=5"])
def test_no_elements_in_any_channels_are_no_bytes(text, shape):
    c, x = lc.codec(text), torch.zeros(shape)
    payload = c.encode(x)
    assert payload.numel() == 0
    assert c.roundtrip(x).shape == x.shape
    channels = None if "C=" in text else shape[-1]
    assert c.encoded_bytes(0, channels=channels) == 0
    assert c.decode(payload, 0, channels=channels).numel() == 0


def test_channels_are_the_last_dimension():
    c = lc.codec("sym8:axis=channel")
    assert (c.spec, c.bucket) == ("sym8:axis=channel", 0)
    scale = torch.tensor([1.0, 100.0, 0.01, 1e-6, 1e6])
    x = torch.randn(6, 7, 5, generator=torch.Generator().manual_seed(1)) * scale
    payload = c.encode(x)
    assert payload.numel() == c.encoded_bytes(x.numel(), channels=5)
    assert torch.equal(payload, lc.codec("sym8:axis=channel,C=5").encode(x.flatten()))
    y = c.decode(payload, x.numel(), channels=5).view_as(x)
    assert torch.equal(y, c.roundtrip(x))
    assert torch.all((y - x).abs().amax((0, 1)) <= scale * 4 / 128)
    for text, call, words in [
        ("sym8:axis=channel", lambda c: c.decode(payload, x.numel()), "channels: expected their number"),
        ("sym8:axis=channel", lambda c: c.decode(payload, x.numel(), channels=-1), "1...65536"),
        ("sym8:axis=channel", lambda c: c.encode(torch.zeros(2, 65537)), "1...65536"),
        ("sym8:axis=channel", lambda c: c.encode(torch.tensor(1.0)), "last dimension"),
        ("sym8:axis=channel", lambda c: c.encoded_bytes(7, channels=5), "multiple of 5"),
        ("sym8:axis=channel,C=4", lambda c: c.encode(x), "multiple of 4"),
        ("sym8:axis=channel,C=4", lambda c: c.decode(payload, 8, channels=5), "expected 4, got 5"),
        ("sym8", lambda c: c.decode(payload, 8, channels=5), "without axis=channel"),
    ]:
        with pytest.raises(ValueError, match=words):
            call(lc.codec(text))
