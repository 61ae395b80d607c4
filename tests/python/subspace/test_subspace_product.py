"""Matrix products by oneDNN, and boundaries on several threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from torch_lowcomm import _C
from torch_lowcomm.subspace.anchor import Anchor
from torch_lowcomm.subspace.basis import Basis
from torch_lowcomm.subspace.boundary import Decode, Encode


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts torch's number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(1, 64, 256), (31, 64, 1024), (128, 16, 1024), (300, 1024, 16), (64, 1024, 777)])
@pytest.mark.parametrize("strided", ["neither", "a", "b"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_is_torchs_to_rounding(shape: tuple[int, int, int], strided: str, dtype: torch.dtype) -> None:
    m, k, n = shape
    a, b = torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype)
    a = a.t().contiguous().t() if strided == "a" else a
    b = b.t().contiguous().t() if strided == "b" else b
    got, expected = _C.product(a, b), a.double() @ b.double()
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert (got - expected).abs().max() <= (1e-5 if dtype == torch.float32 else 1e-13) * k**0.5 * expected.abs().max()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("inference", [False, True])
def test_threads_make_no_difference(dtype: torch.dtype, *, inference: bool) -> None:
    basis, anchor = Basis(1024, 16), Anchor(1000, 1024)
    encode, decode = Encode(basis, anchor), Decode(basis, anchor)
    ids = torch.randint(1000, (3, 333))
    x = torch.randn(3, 333, 1024, dtype=dtype)
    made = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        with torch.inference_mode(inference):
            c = encode(x, ids)
            made.append((c, decode(c, ids)))
    for c, y in made[1:]:
        torch.testing.assert_close(c, made[0][0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(y, made[0][1], rtol=1e-5, atol=1e-5)


def test_a_gradient_has_a_gradient() -> None:
    encode = Encode(Basis(256, 16), Anchor(1000, 256))
    x = torch.randn(2, 40, 256, requires_grad=True)
    gradient = torch.randn(2, 40, 16, requires_grad=True)
    (first,) = torch.autograd.grad(encode(x, torch.randint(1000, (2, 40))), x, gradient, create_graph=True)
    (second,) = torch.autograd.grad(first, gradient, torch.ones_like(first))
    rows = encode.basis.rows(torch.float32)
    torch.testing.assert_close(first, gradient @ rows, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(second, torch.ones_like(first) @ rows.t(), rtol=1e-5, atol=1e-5)
