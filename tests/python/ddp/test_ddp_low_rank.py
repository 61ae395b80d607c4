"""lc.ddp with a rank: factors by codes, their bytes, error feedback, warm start."""

import os

import ddp_model
import pytest
import ranks
import torch

import torch_lowcomm as lc
from torch_lowcomm import _C

STEPS = 4
RANK = 4
CODEC = "sym4:bucket=64"


@pytest.mark.parametrize("size_of_buckets", [0.02, 25])
@pytest.mark.parametrize("projection", [None, "qsgd8:bucket=64"])
@pytest.mark.on("trio", group={})
def test_nothing_is_lost(r, size_of_buckets, projection):
    def backward(model, step):
        ddp_model.loss_of(model, r.rank, step, spare=True).backward()

    state = lc.ddp.State(codec=CODEC, rank=RANK, projection_codec=projection)
    # A few roundings in fp32 a step, of numbers not much larger than the gradients.
    ddp_model.expect_nothing_lost(state, backward, STEPS, 2**-18, bucket_cap_mb=size_of_buckets)


def test_gradients_have_the_rank(r):
    r.init()
    state = lc.ddp.State(codec=CODEC, rank=RANK)
    model = ddp_model.make(state)
    ddp_model.loss_of(model, r.rank, 0, spare=True).backward()
    found = {
        n: torch.linalg.matrix_rank(p.grad, rtol=1e-5).item() for n, p in model.module.named_parameters() if p.ndim == 2
    }
    assert all(found[name] == RANK for name in ddp_model.CODED)
    assert found["small.weight"] > RANK


@pytest.mark.parametrize("projection", [CODEC, "sym8:bucket=64"])
def test_bytes_are_those_of_coded_factors(r, projection):
    r.init()
    state = lc.ddp.State(codec=CODEC, rank=RANK, projection_codec=projection)
    model = ddp_model.make(state, bucket_cap_mb=25)
    ddp_model.loss_of(model, r.rank, 0, spare=True).backward()
    lc.reset_stats()
    for step in range(3):
        ddp_model.loss_of(model, r.rank, step, spare=True).backward()
    stats = next(iter(lc.stats().values()))["all_reduce"]
    codecs = [lc.codec(projection), lc.codec(CODEC)]  # of P, as long as the matrix has rows, and of R
    shapes = [p.shape for n, p in ddp_model.Net().named_parameters() if n in ddp_model.CODED]
    sides = [pair for shape in shapes for pair in zip(codecs, shape, strict=True)]
    codes = sum(ddp_model.slice_bytes(codec, 64, RANK * side, 2) for codec, side in sides)
    every = 4 * sum(p.numel() for p in ddp_model.Net().parameters())
    exact = every - 4 * sum(shape.numel() for shape in shapes)
    assert 3 * (codes + exact) <= stats["wire_bytes"] <= 3 * (codes + exact + 1500), "headers, three descriptions"
    assert stats["raw_bytes"] == 3 * every
    assert stats["calls"] == 6 and stats["exact_calls"] == 3, "one op a bucket, and one of what is exact"


def test_warm_start_nears_the_best_rank(r):
    """The error of one gradient, call after call, without feedback."""
    r.init()
    state = lc.ddp.State(codec="sym8:bucket=64", rank=RANK, error_feedback=False)
    plain, model = ddp_model.make(), ddp_model.make(state)
    ddp_model.loss_of(plain, 5, 0, spare=True).backward()  # the same on all ranks
    whole = plain.module.up.weight.grad
    errors = []
    for _ in range(4):
        model.zero_grad()
        ddp_model.loss_of(model, 5, 0, spare=True).backward()
        errors.append(((model.module.up.weight.grad - whole).norm() / whole.norm()).item())
    s = torch.linalg.svdvals(whole)
    best = (s[RANK:].norm() / s.norm()).item()
    assert errors[0] > best + 0.1, "one projection on random directions"
    assert best - 1e-4 < errors[3] < 1.05 * best + 0.02, "a power iteration a step"


def _on_a_form(r, scalar):
    """A run, rank 0 of which has the loops of the barest CPU."""
    if scalar and r.rank == 0:
        os.environ["LOWCOMM_KERNELS"] = "scalar"  # before the first op, which reads it
    r.init()
    model = ddp_model.make(lc.ddp.State(codec="gauss4", rank=RANK))
    ddp_model.train(model, r.rank, 4, spare=True)
    return _C.kernels(), ddp_model.weights(model)


def test_different_cpus_give_the_same_bits():
    ddp_model.expect_the_same_bits(_on_a_form)


def test_under_detail():
    """A group then holds a wrapper of its backend."""
    ranks.run_ranks(_on_a_form, 2, False, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
