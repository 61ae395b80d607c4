"""The learning rate that nobody gave learns at every size; one that makes the loss grow is warned of, once."""

import logging
import math

import pytest
import torch
from torch import nn

import torch_lowcomm as lc

WIDTH, CLASSES = 32, 8


def _trained(width, steps, lr=None, **options):
    """Losses of a network of two layers on clusters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))
    centres = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(1))
    optimizer = lc.SeedReplay(model, lr, samples=4, **options)
    losses = []
    for step in range(steps):

        def loss(sample, step=step):
            draw = torch.Generator().manual_seed(100 * step + sample)
            y = torch.randint(0, CLASSES, (64,), generator=draw)
            return nn.functional.cross_entropy(model(centres[y] + 0.5 * torch.randn(64, WIDTH, generator=draw)), y)

        losses.append(optimizer.step(loss))
    return optimizer, losses


@pytest.mark.parametrize("width", [16, 128, 620])
def test_the_default_learns(width, caplog):
    with caplog.at_level(logging.WARNING, "torch_lowcomm"):
        optimizer, losses = _trained(width, 150)
    numbers = sum(p.numel() for p in optimizer.param_groups[0]["params"])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.3 / math.sqrt(numbers))
    assert sum(losses[-5:]) / 5 < 0.95 * losses[0]
    assert not caplog.records


def test_a_loss_that_grows_is_warned_of_once(caplog):
    with caplog.at_level(logging.WARNING, "torch_lowcomm"):
        _, losses = _trained(620, 20, lr=1.0)
    assert losses[-1] > 10 * losses[0] or math.isnan(losses[-1])
    (said,) = [record.getMessage() for record in caplog.records]
    assert "SeedReplay: the loss was 2." in said and "got 1;" in said and "lr=None takes 0.00047 here" in said
    assert "Or the closure's loss differs from call to call" in said


def test_the_default_counts_what_is_trained():
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10))
    model[1].requires_grad_(False)
    assert lc.SeedReplay(model).param_groups[0]["lr"] == pytest.approx(0.03)
