import resource

import pytest
import torch

import torch_lowcomm as lc


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.int8, torch.uint8, torch.int16, torch.int64, torch.bool],
)
def test_none_is_exact(dtype):
    c = lc.codec("none")
    x = (torch.arange(100) % 2).to(dtype).reshape(4, 25)
    b = c.encode(x)
    assert b.numel() == (x.numel() * x.element_size() + 63) // 64 * 64
    assert torch.equal(c.decode(b, 100, dtype=dtype).reshape(4, 25), x)
    assert torch.equal(c.roundtrip(x), x)


def test_any_shape_and_stride():
    c = lc.codec("minmax6:bucket=64")
    x = torch.randn(30, 50)
    assert c.roundtrip(x).shape == x.shape
    assert torch.equal(c.encode(x.t()), c.encode(x.t().contiguous().flatten()))
    assert torch.equal(c.encode(x[:, ::2]), c.encode(x[:, ::2].contiguous()))
    assert c.roundtrip(x[:, ::2]).shape == (30, 25)
    assert c.roundtrip(torch.tensor(3.25)).shape == ()
    assert c.roundtrip(torch.tensor(3.25)) == 3.25
    assert c.encode(x.requires_grad_()).numel() > 0
    payload = torch.stack([c.encode(x), c.encode(x)], dim=1)[:, 0]
    assert torch.equal(c.decode(payload, x.numel()), c.roundtrip(x).flatten())


def test_draws():
    c = lc.codec("qsgd2:bucket=64")
    x = torch.randn(4096)
    b = c.encode(x, seed=1, stream=2, step=3)
    assert torch.equal(b, c.encode(x, seed=1, stream=2, step=3 + 2**32))
    for other in [{"seed": 1 + 2**63}, {"seed": 1, "stream": 7}, {"seed": 1, "stream": 2, "step": 4}]:
        assert not torch.equal(b, c.encode(x, **other))


def test_properties():
    c = lc.codec("qsgd4")
    assert (c.spec, c.bits, c.bucket) == ("qsgd4:bucket=1024", 4, 1024)
    assert repr(c) == "codec('qsgd4:bucket=1024')"
    none = lc.codec("none")
    assert (none.spec, none.bits, none.bucket) == ("none", 0, 0)
    assert lc.codec("minmax4:bucket=1024").encoded_bytes(1537) == 896
    assert none.encoded_bytes(9, torch.float64) == 128


def test_callers_mistakes():
    c = lc.codec("minmax8:bucket=64")
    x = torch.randn(100)
    b = c.encode(x)
    for dtype in [torch.float64, torch.int32, torch.complex64]:
        with pytest.raises(TypeError, match="expected"):
            c.encode(torch.zeros(4, dtype=dtype))
    with pytest.raises(TypeError, match="float32, float16 or bfloat16, got float64"):
        c.decode(b, 100, dtype=torch.float64)
    with pytest.raises(TypeError, match="1-D uint8"):
        c.decode(x, 100)
    with pytest.raises(ValueError, match="bytes, got"):
        c.decode(b, 1000)
    with pytest.raises(ValueError, match="numel"):
        c.decode(b, -1)
    with pytest.raises(ValueError, match="numel"):
        lc.codec("none").decode(torch.empty(0, dtype=torch.uint8), 2**61, dtype=torch.float64)
    with pytest.raises(ValueError, match="CPU"):
        c.encode(torch.empty(4, device="meta"))
    with pytest.raises(ValueError, match="element 3"):
        c.encode(torch.tensor([0.0, 1.0, 2.0, torch.nan]))
    with pytest.raises(TypeError):
        c.encode(x, 1)  # seed is keyword-only


@pytest.mark.parametrize("spec", ["sym4:bucket=1024", "none", "levels2:bucket=64", "sym4:axis=channel"])
def test_out_is_filled_and_returned(spec):
    c, x = lc.codec(spec), torch.randn(30, 64)
    channels = {"channels": 64} if "axis" in spec else {}
    table = {"table": torch.tensor([0.0, 0.3, 0.7, 1.0])} if "levels" in spec else {}
    b, y = c.encode(x, **table), c.roundtrip(x, **table)
    payload, version = torch.empty(len(b) + 7, dtype=torch.uint8)[7:], torch.empty(x.shape)
    assert c.encode(x, out=payload, **table) is payload and torch.equal(payload, b)
    before = version._version
    assert c.decode(b, x.numel(), out=version, **channels, **table) is version and torch.equal(version, y)
    assert version._version > before
    for dtype in [torch.bfloat16, torch.float32] if spec != "none" else [torch.float32]:
        out = torch.empty(x.numel(), dtype=dtype)  # whose dtype is meant
        assert torch.equal(c.decode(b, x.numel(), out=out, **channels, **table), y.to(dtype).flatten())
    assert c.roundtrip(x, out=x, **table) is x and torch.equal(x, y)
    empty = torch.empty(0, 64)
    assert c.roundtrip(empty, out=empty, **table) is empty


def test_out_that_does_not_fit_is_refused_and_untouched():
    c, x = lc.codec("minmax8:bucket=64"), torch.randn(100)
    b = c.encode(x)
    n = len(b)
    calls = {
        "encode": (lambda out: c.encode(x, out=out), n, torch.uint8),
        "decode": (lambda out: c.decode(b, 100, dtype=torch.float32, out=out), 100, torch.float32),
        "roundtrip": (lambda out: c.roundtrip(x, out=out), 100, torch.float32),
    }
    for call, size, dtype in calls.values():
        for wrong, error, said in [
            (torch.zeros(size, dtype=torch.float16), TypeError, "out: expected a tensor of .*, got 1-D Half"),
            (torch.zeros(size + 1, dtype=dtype), ValueError, f"out: expected .*{size} elements.*, got.* {size + 1}"),
            (torch.zeros(2 * size, dtype=dtype)[::2], ValueError, "out: expected a contiguous tensor"),
            (torch.zeros(1, dtype=dtype).expand(size), ValueError, "out: expected a contiguous tensor"),
            (
                torch.zeros(size, dtype=dtype, device="meta"),
                ValueError,
                "out: expected a dense CPU tensor, got .* meta",
            ),
        ]:
            with pytest.raises(error, match=said):
                call(wrong)
            assert wrong.device.type == "meta" or not wrong.any()
    with pytest.raises(ValueError, match="without requires_grad"):
        c.roundtrip(x, out=torch.zeros(100, requires_grad=True))
    with pytest.raises(ValueError, match="overlaps"):
        c.encode(x, out=x.view(torch.uint8)[-n:])
    memory = torch.zeros(400, dtype=torch.uint8)
    memory[:n] = b
    with pytest.raises(ValueError, match="overlaps"):
        c.decode(memory[:n], 100, out=memory.view(torch.float32))
    with pytest.raises(ValueError, match="x's shape"):
        c.roundtrip(x, out=torch.zeros(10, 10))
    assert torch.equal(c.decode(memory[:n], 100), c.roundtrip(x))


def test_results_are_in_memory_that_earlier_ones_had():
    """Page faults tell it: fresh memory of 64 MiB takes 16,384, or 32 of huge pages; kept memory takes none."""

    def faults(call):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        call()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    c, x = lc.codec("minmax8:bucket=1024"), torch.ones(1 << 24)
    b = c.encode(x)
    for call in (lambda: c.encode(x), lambda: c.decode(b, x.numel()), lambda: c.roundtrip(x)):
        call()
        assert min(faults(call) for _ in range(5)) < 8
    y = c.decode(b, x.numel())
    assert y.data_ptr() != c.decode(b, x.numel()).data_ptr()  # what is in use is nobody else's
    y.resize_(x.numel() + 1000)  # as any tensor
    assert torch.equal(y[: x.numel()], c.decode(b, x.numel()))


def test_a_grid_too_coarse_for_its_bucket_is_warned_of_once(caplog):
    for _ in range(2):
        lc.codec("minmax2:bucket=32768")
        lc.codec("qsgd1:bucket=16384")
        lc.codec("minmax2:bucket=256")
        lc.codec("minmax3:bucket=8192")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, said
    assert "minmax2:bucket=32768" in said[0]
    assert "qsgd1:bucket=16384" in said[1]
