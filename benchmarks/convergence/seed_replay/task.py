"""The small task of `convergence seed_replay`: eight Gaussian clusters in 20 dimensions and an MLP 20-32-8."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

FEATURES, HIDDEN, CLASSES = 20, 32, 8
SPREAD = 1.5  # standard deviation of the centres' coordinates; that of a point around its centre is 1


class Clusters:
    """Points and the cluster of each, drawn anew for every batch. `seed` and `spread` are those of the centres, whose coordinates
    are moved by `shift` (standard deviation): a network that was trained where they were is tuned for such a task.
    """

    def __init__(self, seed: int, spread: float = SPREAD, shift: float = 0.0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.centres = torch.randn(CLASSES, FEATURES, generator=draw) * spread
        self.centres += torch.randn(CLASSES, FEATURES, generator=draw) * shift

    def points(self, count: int, *key: object) -> tuple[Tensor, Tensor]:
        """(count, 20) float32 and (count) int64; equal keys give equal points."""
        draw = torch.Generator().manual_seed(random.Random(" ".join(map(str, key))).getrandbits(63))
        classes = torch.randint(CLASSES, (count,), generator=draw)
        return self.centres[classes] + torch.randn(count, FEATURES, generator=draw), classes


def network(seed: int) -> nn.Sequential:
    """The MLP, 936 parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy, nats."""
    points, classes = batch
    return functional.cross_entropy(model(points), classes)


def mistakes(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The share of points that are put into a wrong cluster: an objective without a gradient."""
    points, classes = batch
    return (model(points).argmax(1) != classes).float().mean()


def pretrained(seed: int, steps: int = 600) -> nn.Sequential:
    """The MLP after back-propagation on the clusters before they move, the same on every rank."""
    model, clusters = network(seed), Clusters(seed, spread=0.7)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, clusters.points(512, "pretraining", seed, step)).backward()
        optimizer.step()
    return model


def moved(seed: int) -> Clusters:
    """The clusters that a pretrained network is tuned for."""
    return Clusters(seed, spread=0.7, shift=0.3)


def trained_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Those that are not frozen."""
    return (parameter for parameter in model.parameters() if parameter.requires_grad)
