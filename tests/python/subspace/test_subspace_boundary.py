"""The boundary of a subspace-constrained pipeline: its numbers by FORMAT.md alone, its arithmetic, its gradients, its errors."""

import noise_by_hand
import numpy as np
import pytest
import torch

from torch_lowcomm.subspace.anchor import Anchor
from torch_lowcomm.subspace.basis import Basis
from torch_lowcomm.subspace.boundary import Decode, Encode

SUBSPACE = 0x7375627370616365
WIDTH, RANK, VOCABULARY, CONTEXT = 96, 12, 50, 10


def _row(token, width, seed, sigma, kind="rademacher"):
    z = noise_by_hand.noise(kind, noise_by_hand.seed_of(SUBSPACE, seed, 1, 0), token, 0, width)
    return z * np.float32(sigma)


def _product(a, b):
    sums = [np.float64(0)] * 8
    for e in range(len(a)):
        sums[e % 8] = sums[e % 8] + a[e] * b[e]
    for half in (4, 2, 1):
        sums[:half] = [sums[i] + sums[i + half] for i in range(half)]
    return sums[0]


def _basis(rank, width, seed):
    z = noise_by_hand.noise("gaussian", noise_by_hand.seed_of(SUBSPACE, seed, 0, 0), 0, 0, rank * width)
    rows = z.astype(np.float64).reshape(rank, width)
    for r in range(rank):
        for q in range(r):
            rows[r] = rows[r] - _product(rows[q], rows[r]) * rows[q]
        rows[r] = rows[r] * (1 / np.sqrt(_product(rows[r], rows[r])))
    return rows


def test_a_basis_by_the_format_alone():
    assert np.array_equal(Basis(41, 5, seed=9).vectors.numpy(), _basis(5, 41, 9))


@pytest.mark.parametrize("fixed", ["signs", "gaussian"])
def test_rows_of_tokens_by_the_format_alone(fixed):
    anchor = Anchor(70_000, 2100, seed=3, sigma=0.2, fixed=fixed)
    kind = "rademacher" if fixed == "signs" else "gaussian"
    for token in (0, 1, 65_537, 69_999):
        row = anchor(torch.tensor([token]))[0]
        assert np.array_equal(row.numpy(), _row(token, 2100, 3, 0.2, kind))


def _parts(dtype, *, positions=True, fixed="signs"):
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(CONTEXT, WIDTH, generator=generator) if positions else None
    basis = Basis(WIDTH, RANK, seed=1)
    anchor = Anchor(VOCABULARY, WIDTH, seed=2, positions=table, fixed=fixed)
    ids = torch.randint(VOCABULARY, (3, CONTEXT), generator=generator)
    inside = basis.project(torch.randn(3, CONTEXT, WIDTH, generator=generator, dtype=dtype))
    return basis, anchor, ids, inside


@pytest.mark.parametrize("fixed", ["signs", "gaussian"])
@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_an_activation_of_the_subspace_comes_back(dtype, bound, positions, fixed):
    basis, anchor, ids, inside = _parts(dtype, positions=positions, fixed=fixed)
    x = inside + anchor(ids, dtype)
    encode, decode = Encode(basis, anchor), Decode(basis, anchor)
    c = encode(x, ids)
    assert c.shape == (3, CONTEXT, RANK)
    assert c.dtype == dtype
    assert (decode(c, ids) - x).abs().max() < bound
    # Later places of a sequence, as in generation.
    later = encode(x[:, 4:], ids[:, 4:], start=4)
    torch.testing.assert_close(later, c[:, 4:], rtol=0, atol=bound)
    assert (decode(later, ids[:, 4:], start=4) - x[:, 4:]).abs().max() < bound


def test_gradients():
    basis, anchor, ids, inside = _parts(torch.float64)
    x = inside.requires_grad_()
    c = torch.randn(3, CONTEXT, RANK, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: Encode(basis, anchor)(x, ids), (x,))
    assert torch.autograd.gradcheck(lambda c: Decode(basis, anchor)(c, ids), (c,))
    # Both sides of a boundary: Eq. 9 and 10 of the paper, the gradient's part in S.
    g = torch.randn_like(x)
    (got,) = torch.autograd.grad(Decode(basis, anchor)(Encode(basis, anchor)(x, ids), ids), x, g)
    torch.testing.assert_close(got, basis.project(g), rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_narrow_types_compute_a_boundary_in_float32(dtype):
    basis, anchor, ids, inside = _parts(torch.float32)
    x = (inside + anchor(ids)).to(dtype)
    c = Encode(basis, anchor)(x, ids)
    assert c.dtype == torch.float32
    torch.testing.assert_close(c, Encode(basis, anchor)(x.float(), ids), rtol=0, atol=0)
    y = Decode(basis, anchor)(c, ids)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, x.float(), rtol=0.02, atol=0.02)


def test_large_and_empty_tensors_and_strides():
    basis, anchor = Basis(1030, 17), Anchor(9, 1030)
    ids = torch.randint(9, (40, 33))
    x = torch.randn(33, 40, 1030).transpose(0, 1)
    expected = (x - anchor(ids)) @ basis.rows(x.dtype).t()
    torch.testing.assert_close(Encode(basis, anchor)(x, ids), expected, rtol=1e-4, atol=1e-4)
    assert Encode(basis, anchor)(torch.empty(0, 5, 1030), torch.empty(0, 5, dtype=torch.int64)).shape == (0, 5, 17)


def test_autocast_leaves_gradients_of_a_boundary_in_float32():
    basis, anchor, ids, inside = _parts(torch.float32)
    x = inside.requires_grad_()
    g = torch.randn(3, CONTEXT, RANK)
    with torch.autocast("cpu", torch.bfloat16):
        c = Encode(basis, anchor)(x, ids)
        c.backward(g)
    assert c.dtype == torch.float32
    torch.testing.assert_close(x.grad, g @ basis.rows(torch.float32), rtol=0, atol=0)


def test_a_basis_stays_exact_in_a_converted_model_and_is_saved_with_it():
    basis = Basis(WIDTH, RANK, seed=5)
    before = basis.vectors.clone()
    module = torch.nn.ModuleDict({"basis": basis, "linear": torch.nn.Linear(2, 2)}).to(torch.bfloat16)
    assert torch.equal(basis.vectors, before)
    assert module["linear"].weight.dtype == torch.bfloat16
    other = torch.nn.ModuleDict({"basis": Basis(WIDTH, RANK, seed=6), "linear": torch.nn.Linear(2, 2)})
    rows = other["basis"].rows(torch.float32)
    assert other["basis"].checksum != basis.checksum
    other.load_state_dict(module.state_dict())
    assert torch.equal(other["basis"].vectors, before) and other["basis"].checksum == basis.checksum
    assert torch.equal(other["basis"].rows(torch.float32), before.float()) and not torch.equal(rows, before.float())
    # In place, as a distributed checkpoint is loaded into a state dict.
    another = Basis(WIDTH, RANK, seed=7)
    other.state_dict()["basis.vectors"].copy_(another.vectors)
    assert torch.equal(other["basis"].rows(torch.float32), another.vectors.float())
    assert torch.equal(other["basis"].rows(torch.float64), another.vectors)
    assert other["basis"].checksum == another.checksum != basis.checksum


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Basis(8, 0), "rank: expected 1...8, the width, got 0"),
        (lambda: Basis(8, 9), "rank: expected 1...8, the width, got 9"),
        (lambda: Basis(8, 2, seed=-1), "seed: expected 0 or more, below 2^64, got -1"),
        (lambda: Anchor(0, 8), "vocabulary: expected 1...2147483648, got 0"),
        (lambda: Anchor(5, 8, sigma=-1.0), "sigma: expected a finite number of 0 or more, got -1.0"),
        (lambda: Anchor(5, 8, fixed="table"), "fixed: expected 'signs' or 'gaussian', got 'table'"),
        (lambda: Anchor(5, 8, positions=torch.ones(3, 7)), "positions: expected [context, 8], got shape (3, 7)"),
        (lambda: Anchor(5, 8)(torch.tensor([4, 5])), "ids: expected 0...4, got 5 at element 1"),
        (lambda: Anchor(5, 8)(torch.tensor([-1])), "ids: expected 0...4, got -1 at element 0"),
        (
            lambda: Anchor(5, 8, positions=torch.ones(3, 8))(torch.zeros(4, dtype=torch.int64)),
            "at most 3 places, got 4",
        ),
        (
            lambda: Encode(Basis(8, 2), Anchor(5, 8))(torch.ones(2, 3, 7), torch.zeros(2, 3, dtype=torch.int64)),
            "activation: expected [..., 8] for ids of shape [2, 3] on cpu, got [2, 3, 7]",
        ),
        (
            lambda: Decode(Basis(8, 2), Anchor(5, 8))(torch.ones(2, 3, 3), torch.zeros(2, 3, dtype=torch.int64)),
            "coefficients: expected [..., 2] for ids of shape [2, 3] on cpu, got [2, 3, 3]",
        ),
    ],
)
def test_mistakes_are_named(make, said):
    with pytest.raises(ValueError) as error:
        make()
    assert said in str(error.value)


def test_nothing_grows_with_the_vocabulary():
    sizes = {sum(b.numel() for b in Anchor(v, 64).state_dict().values()) for v in (10, 1000, 2**31)}
    assert sizes == {3}
    assert Anchor(2**31, 64)(torch.tensor([2**31 - 1])).abs().max() > 0
