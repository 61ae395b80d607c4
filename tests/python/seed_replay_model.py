"""The small task that the tests of lc.SeedReplay share: eight clusters in twenty dimensions, and a net of two layers."""

import torch
from torch import nn

import torch_lowcomm as lc

CLUSTERS, WIDTH = 8, 20


def batch(number, size=64):
    """(x, y): the same ones for a number, on every machine."""
    draw = torch.Generator().manual_seed(1000 + number)
    centres = torch.randn(CLUSTERS, WIDTH, generator=torch.Generator().manual_seed(1))
    y = torch.randint(0, CLUSTERS, (size,), generator=draw)
    return centres[y] + 0.5 * torch.randn(size, WIDTH, generator=draw), y


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, CLUSTERS)).to(dtype)


def loss(model, number):
    x, y = batch(number)
    return nn.functional.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), y)


def machine(model=None, **options):
    """(model, optimizer) of one machine."""
    model = model if model is not None else net()
    return model, lc.SeedReplay(model, **{"lr": 1e-2, "samples": 4, **options})


def train(model, optimizer, iterations, first=0):
    """Losses of iterations, whose batches depend on iteration and sample alone."""
    return [
        optimizer.step(lambda sample: loss(model, optimizer.iteration * 64 + first + sample)) for _ in range(iterations)
    ]
