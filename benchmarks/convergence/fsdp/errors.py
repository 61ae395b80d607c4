"""QSDP's Figures 7 and 8: what learned and even levels lose of weights and gradients while a model trains.

One run learns its levels once, another at the paper's three points of a run. The error is relative to the tensor in L2. The paper
shows an attention layer and the head; here the head has under 100,000 elements, and the other is a layer of the MLP.
"""

from __future__ import annotations

import math
from typing import Any

from report import Gate
from tables import Table, to_json

from convergence.fsdp import runs as fsdp_runs
from convergence.fsdp.rank import Configuration
from torch_lowcomm.fsdp.levels import PAPERS_STEPS

PAPERS_RUN = 4800  # steps, of GPT-125M on C4
MODEL = {"width": 256, "layers": 2}  # its matrices have over 100,000 elements, and learn
STEPS, EVERY = 200, 10
BITS = {"weights": 5, "gradients": 4}
SHOWN = {"blocks.0.attention.qkv.weight": "attention", "blocks.0.up.weight": "MLP"}


def learned_at(steps: int) -> tuple[int, ...]:
    """The paper's steps at which levels are learned, as shares of a run of so many."""
    return tuple(round(at * steps / PAPERS_RUN) for at in PAPERS_STEPS)


def measure(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """Runs both ways, with seed 0. `quick`: few steps, of the run that learns once."""
    steps, every = (6, 2) if quick else (STEPS, EVERY)
    at = (1,) if quick else learned_at(steps)
    ways = {"learned once": at[:1]} if quick else {"learned once": at[:1], "learned three times": at}
    specs = {what: f"levels{bits}:bucket=1024" for what, bits in BITS.items()}
    runs = []
    for name, learn_at in ways.items():
        c = Configuration(steps=steps, learn_at=learn_at, errors_every=every, validation_batches=0, **specs, **MODEL)
        runs.append(of_run(name, fsdp_runs.run(name, c)["ranks"], learn_at))
    bound, loose = (1.1, ", loose") if quick else (1.0, "")
    gates = []
    for entry in runs:
        for what, bits in BITS.items():
            title = f"largest L2 error of learned / even levels, {bits} bits, {what}, {entry['name']}{loose}"
            gates.append(Gate(title, worst(entry, what), "<", bound))
    table = table_of(runs)
    print(table.text())
    return {"tables": to_json([table]), "errors": runs}, gates


def of_run(name: str, ranks: list[dict[str, Any]], learn_at: tuple[int, ...]) -> dict[str, Any]:
    """Relative errors of all ranks' shards together: by `weights` and `gradients`, and by tensor, a number a step."""
    points = [rank["errors"] for rank in ranks]
    entry: dict[str, Any] = {"name": name, "learn_at": list(learn_at), "step": [int(step) for step in points[0]]}
    for what in BITS:
        entry[what] = {}
        for tensor in next(iter(points[0].values()))[what]:
            sums = [
                [sum(part) for part in zip(*(rank[step][what][tensor] for rank in points), strict=True)]
                for step in points[0]
            ]
            entry[what][tensor] = {
                way: [math.sqrt(point[i] / point[2]) for point in sums] for i, way in enumerate(("learned", "even"))
            }
    return entry


def worst(entry: dict[str, Any], what: str) -> float:
    """The largest ratio of learned to even levels' error over all tensors and measurements after the first learning."""
    return max(
        learned / even
        for errors in entry[what].values()
        for step, learned, even in zip(entry["step"], errors["learned"], errors["even"], strict=True)
        if step > entry["learn_at"][0]
    )


def table_of(runs: list[dict[str, Any]]) -> Table:
    """A row a tensor and run: even levels' error and the ratio, at the first measurement after learning, and at the last."""
    steps = runs[0]["step"]
    first = next(i for i, step in enumerate(steps) if step > runs[0]["learn_at"][0])
    rows = []
    for what, bits in BITS.items():
        for tensor, label in SHOWN.items():
            for entry in runs:
                row = [f"{what}, {bits} bits", label, entry["name"]]
                for at in (first, -1):
                    even, learned = (entry[what][tensor][way][at] for way in ("even", "learned"))
                    row += [f"{even:.4f}", f"{learned:.4f}", f"{learned / even:.3f}"]
                rows.append(row)
    columns = ["what", "layer", "levels"]
    columns += [f"step {steps[at]}: {cell}" for at in (first, -1) for cell in ("even", "learned", "ratio")]
    return Table("relative L2 error of even and of learned levels (the paper's Figures 7 and 8)", columns, rows)
