"""All machines of a run in one process: the same gradients one after another, without lc.SeedReplay's Python."""

from __future__ import annotations

from typing import Any

import torch
from torch.func import functional_call

from convergence.seed_replay import task
from convergence.seed_replay.rank import Configuration, Curve
from torch_lowcomm import _C

# Those of lc.SeedReplay.
DEFAULTS = {
    "noise": "rademacher",
    "codec": "logbyte",
    "lr_scale": "sqrt",
    "seed": 0,
    "pool": 0,
    "base": "",
}


def train(rank: int, init_method: str, *, configuration: Configuration) -> dict[str, Any]:
    """Trains with the ids of all machines, n gradients by each; returns what rank.train returns of a machine."""
    c = configuration
    model, clusters = c.model(), c.clusters()
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    parameters = [(name, model.get_parameter(name), True, 0) for name in names]
    core = _C.SeedReplay(parameters, DEFAULTS | dict(c.options))
    curve = Curve(c, model, clusters, core.checksum)

    def estimate(machine: int, sample: int) -> float:
        batch = c.points(clusters, machine, core.iteration, sample)
        sides = []
        for factor in (c.eps, -c.eps):
            weights = {name: core.perturbed(i, machine, sample, factor) for i, name in enumerate(names)}
            sides.append(task.loss(lambda points, weights=weights: functional_call(model, weights, points), batch))
        return (sides[0].item() - sides[1].item()) / (2 * c.eps)

    with torch.no_grad():
        while core.iteration < c.iterations:
            curve.measure(core.iteration, sent=0)
            messages = [
                core.message(machine, [estimate(machine, sample) for sample in range(c.samples)])
                for machine in range(c.machines)
            ]
            core.apply(core.record(messages, lr=c.lr, weight_decay=0.0))
    curve.measure(c.iterations, sent=0)
    return curve.points
