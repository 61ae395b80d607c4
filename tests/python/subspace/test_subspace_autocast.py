"""Autocast around a whole training step rounds nothing of the subspace: what is projected is projected in its own type."""

import contextlib

import pytest
import subspace_case as case
import torch

import torch_lowcomm as lc


@pytest.fixture
def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def _trained(autocast, change):
    """A decoder after three steps from gradients in full precision; clipping and steps run in autocast where there is one."""
    model, ids = change(case.constrained(torch.float32)), case.ids()
    optimizer = lc.SubspaceAdamW(model, lr=1e-2, check_every=1)
    for _ in range(3):
        model(ids, ids).backward()
        with autocast or contextlib.nullcontext():
            optimizer.clip_grad_norm(0.1)
            optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("change", [lambda model: model, lc.subspace.reparam], ids=["weights", "coordinates"])
def test_steps_have_the_same_bits(autocast, change):
    want = _trained(None, change)
    for name, value in _trained(autocast, change).items():
        assert torch.equal(value, want[name]), name


def test_closures_keep_autocast(autocast):
    """The caller's own computation has it, inside of a step too."""
    model, seen = case.constrained(torch.float32), []
    optimizer = lc.SubspaceAdamW(model)
    with autocast:
        optimizer.step(lambda: seen.append(torch.is_autocast_enabled("cpu")))
    assert seen == [True]


def test_constrain_and_check(autocast):
    with autocast:
        model = case.constrained(torch.float32)
        assert lc.subspace.check(model) == []
    for name, value in case.constrained(torch.float32).state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_coordinates_of_an_embedding(autocast):
    model, ids = lc.subspace.reparam(case.constrained(torch.float32)), case.ids()
    want = model.embed(ids)
    with autocast:
        assert torch.equal(model.embed(ids), want)
