"""One machine of `convergence seed_replay`: trains the MLP by seed replay or by a baseline, and counts what it sends."""

from __future__ import annotations

import dataclasses
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from measure import reduced_bytes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import torch_lowcomm as lc
from convergence.seed_replay import task

POINTS = 20  # of a curve


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One run.

    Attributes:
        method: `replay` (lc.SeedReplay), or a baseline: `full gradient` (the estimated gradient is a tensor that is
            all-reduced), `back-propagation` (DDP), `averaging` (local steps of SGD, then the mean of the parameters).
        lr: Of `replay` and `full gradient` η, divided by √k as `lr_scale` says; of the others SGD's.
        eps: How far forward evaluations are from the weights.
        options: Of lc.SeedReplay.
        tune: Train the last layer of a network that was trained where the clusters lay before.
        objective: `loss`, or `mistakes`, which has no gradient.
    """

    method: str = "replay"
    lr: float = 0.01
    eps: float = 1e-3
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tune: bool = False
    objective: str = "loss"
    iterations: int = 400
    samples: int = 4  # a machine and iteration
    machines: int = 4
    batch: int = 64
    seed: int = 0

    def model(self) -> nn.Sequential:
        """As it is before the first iteration."""
        if not self.tune:
            return task.network(self.seed)
        model = task.pretrained(self.seed)
        model[0].requires_grad_(False)
        return model

    def clusters(self) -> task.Clusters:
        """Returns the data that it is trained on."""
        return task.moved(self.seed) if self.tune else task.Clusters(self.seed)

    def points(self, clusters: task.Clusters, machine: int, iteration: int, sample: int) -> tuple[Tensor, Tensor]:
        """A batch of one machine's data."""
        return clusters.points(self.batch, self.seed, machine, iteration, sample)


def train(rank: int, init_method: str, *, configurations: list[Configuration]) -> list[dict[str, Any]]:
    """Trains a model by each configuration, one after another in these processes; of each what `_run` returns."""
    dist.init_process_group("lowcomm", init_method=init_method, rank=rank, world_size=configurations[0].machines)
    runs = [_run(rank, configuration) for configuration in configurations]
    dist.destroy_process_group()
    return runs


def _run(rank: int, c: Configuration) -> dict[str, Any]:
    """One run.

    Returns:
        Lists, of about POINTS iterations: `iteration`; `loss`, on 4096 points that are not trained on; `bytes` sent by this
        machine so far; `seconds`; `checksum` of what machines agree on. `payload`, the bytes of gradients received from others in
        all (of `replay`); `gradients` that all machines evaluated, forward or backward.
    """
    model, clusters = c.model(), c.clusters()
    step, counted = _STEPS[c.method](rank, c, model, clusters)
    points: dict[str, list[Any]] = {key: [] for key in ("iteration", "loss", "bytes", "seconds", "checksum")}
    validation = clusters.points(4096, "validation", c.seed)
    start, before = time.monotonic(), counted()["bytes"]
    for iteration in range(c.iterations + 1):
        if iteration % max(1, c.iterations // POINTS) == 0 or iteration == c.iterations:
            with torch.no_grad():
                loss = task.loss(model, validation).item()
            now = counted()
            measured = iteration, loss, now["bytes"] - before, time.monotonic() - start, now["checksum"]
            for key, value in zip(points, measured, strict=True):
                points[key].append(value)
        if iteration < c.iterations:
            step(iteration)
    gradients = c.iterations * c.samples * c.machines
    return points | {"payload": counted().get("payload", 0), "gradients": gradients}


Step = Callable[[int], None]
Counted = Callable[[], dict[str, int]]


def _replay(rank: int, c: Configuration, model: nn.Module, clusters: task.Clusters) -> tuple[Step, Counted]:
    objective = getattr(task, c.objective)
    optimizer = lc.SeedReplay(model, c.lr, eps=c.eps, samples=c.samples, group=dist.group.WORLD, **c.options)

    def step(iteration: int) -> None:
        optimizer.step(lambda sample: objective(model, c.points(clusters, rank, iteration, sample)))

    def counted() -> dict[str, int]:
        stats = optimizer.stats()
        # The core's: in place, the weights themselves drift apart by roundings until they are put right.
        checksum = optimizer.core.checksum()
        return {"bytes": stats["sent_bytes"], "payload": stats["payload_bytes"], "checksum": checksum}

    return step, counted


def _full_gradient(rank: int, c: Configuration, model: nn.Module, clusters: task.Clusters) -> tuple[Step, Counted]:
    parameters = list(task.trained_parameters(model))
    draw = torch.Generator().manual_seed(c.seed * c.machines + rank)

    def step(iteration: int) -> None:
        weights = parameters_to_vector(parameters).detach().clone()
        estimate = torch.zeros_like(weights)
        for sample in range(c.samples):
            batch = c.points(clusters, rank, iteration, sample)
            z = torch.randint(0, 2, weights.shape, generator=draw) * 2.0 - 1
            sides = []
            for sign in (1, -1):
                vector_to_parameters(weights + sign * c.eps * z, parameters)
                sides.append(task.loss(model, batch).item())
            estimate += (sides[0] - sides[1]) / (2 * c.eps) * z
        dist.all_reduce(estimate)
        vector_to_parameters(weights - c.lr / (c.samples * c.machines) ** 0.5 * estimate, parameters)

    def without_grad(iteration: int) -> None:
        with torch.no_grad():
            step(iteration)

    return without_grad, _reduced(model)


def _back_propagation(rank: int, c: Configuration, model: nn.Module, clusters: task.Clusters) -> tuple[Step, Counted]:
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(task.trained_parameters(model), lr=c.lr)

    def step(iteration: int) -> None:
        optimizer.zero_grad()
        batches = [c.points(clusters, rank, iteration, sample) for sample in range(c.samples)]
        with ddp.no_sync():
            for batch in batches[:-1]:
                (task.loss(ddp, batch) / c.samples).backward()
        (task.loss(ddp, batches[-1]) / c.samples).backward()
        optimizer.step()

    return step, _reduced(model)


def _averaging(rank: int, c: Configuration, model: nn.Module, clusters: task.Clusters) -> tuple[Step, Counted]:
    parameters = list(task.trained_parameters(model))
    optimizer = torch.optim.SGD(parameters, lr=c.lr)

    def step(iteration: int) -> None:
        for sample in range(c.samples):
            optimizer.zero_grad()
            task.loss(model, c.points(clusters, rank, iteration, sample)).backward()
            optimizer.step()
        mean = parameters_to_vector(parameters).detach()
        dist.all_reduce(mean)
        with torch.no_grad():
            vector_to_parameters(mean / c.machines, parameters)

    return step, _reduced(model)


def _reduced(model: nn.Module) -> Counted:
    def counted() -> dict[str, int]:
        weights = parameters_to_vector(model.parameters()).detach()
        return {"bytes": reduced_bytes(), "checksum": zlib.crc32(weights.numpy().tobytes())}

    return counted


_STEPS: dict[str, Callable[..., tuple[Step, Counted]]] = {
    "replay": _replay,
    "full gradient": _full_gradient,
    "back-propagation": _back_propagation,
    "averaging": _averaging,
}
