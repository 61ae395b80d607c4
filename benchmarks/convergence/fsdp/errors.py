"""QSDP's Figures 7 and 8: what learned and even levels lose of weights and gradients while a model trains.

One run learns its levels once, another at the paper's three points of a run. The error is relative to the tensor in L2. The paper
shows an attention layer and the head; here the head has under 100,000 elements, and the other is a layer of the MLP.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import launch
import pictures
from report import Gate
from tables import Table, to_json

from convergence.fsdp import errors_rank
from convergence.fsdp.levels import MODEL, learned_at
from convergence.fsdp.runs import RANKS

STEPS, EVERY = 200, 10
BITS = {"weights": 5, "gradients": 4}
SHOWN = {"blocks.0.attention.qkv.weight": "attention", "blocks.0.up.weight": "MLP"}


def measure(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """Runs both.

    Args:
        quick: Few steps, of the run that learns once.
        seeds: Is not used: the runs have seed 0.

    Returns:
        `tables` and `errors` for the JSON: a list a run of `name`, `learn_at`, `step`, and by `weights` and `gradients` and by
        tensor the relative errors `learned` and `even`, a number a step; and the gates.
    """
    steps, every = (6, 2) if quick else (STEPS, EVERY)
    at = (1,) if quick else learned_at(steps)
    ways = {"learned once": at[:1]} if quick else {"learned once": at[:1], "learned three times": at}
    runs = [run(name, steps, every, learn_at) for name, learn_at in ways.items()]
    bound, loose = (1.1, ", loose") if quick else (1.0, "")
    gates = []
    for entry in runs:
        for what, bits in BITS.items():
            title = f"largest L2 error of learned / even levels, {bits} bits, {what}, {entry['name']}{loose}"
            gates.append(Gate(title, worst(entry, what), "<", bound))
    table = table_of(runs)
    print(table.text())
    return {"tables": to_json([table]), "errors": runs}, gates


def run(name: str, steps: int, every: int, learn_at: tuple[int, ...]) -> dict[str, Any]:
    """One training: relative errors of all ranks' shards together."""
    job = {"steps": steps, "every": every, "learn_at": learn_at, "shape": MODEL}
    ranks = launch.run(errors_rank.train, ranks=RANKS, deadline_s=60 + 4.0 * steps, world=RANKS, **job)
    entry: dict[str, Any] = {"name": name, "learn_at": list(learn_at), "step": ranks[0]["step"]}
    for what in BITS:
        entry[what] = {}
        for tensor in ranks[0][what]:
            points = zip(*(rank[what][tensor] for rank in ranks), strict=True)
            sums = [[sum(part) for part in zip(*of_ranks, strict=True)] for of_ranks in points]
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
    rows = []
    for what, bits in BITS.items():
        for tensor, label in SHOWN.items():
            for entry in runs:
                errors = entry[what][tensor]
                first = next(i for i, step in enumerate(entry["step"]) if step > entry["learn_at"][0])
                row = [f"{what}, {bits} bits", label, entry["name"]]
                for at in (first, -1):
                    even, learned = errors["even"][at], errors["learned"][at]
                    row += [f"{even:.4f}", f"{learned:.4f}", f"{learned / even:.3f}"]
                rows.append(row)
    steps = [next(step for step in runs[0]["step"] if step > runs[0]["learn_at"][0]), runs[0]["step"][-1]]
    columns = ["what", "layer", "levels"]
    columns += [f"step {step}: {cell}" for step in steps for cell in ("even", "learned", "ratio")]
    return Table("relative L2 error of even and of learned levels (the paper's Figures 7 and 8)", columns, rows)


def draw(errors: list[dict[str, Any]], path: Path, *, title: str) -> None:
    """Writes a PNG: a panel a tensor's weights and a panel its gradients, with a dashed line where levels are learned."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(BITS), len(SHOWN), figsize=(9.6, 6.4), dpi=140, layout="constrained", sharex=True
    )
    for row, (what, bits) in zip(panels, BITS.items(), strict=True):
        for axes, (tensor, label) in zip(row, SHOWN.items(), strict=True):
            for entry in errors:
                axes.plot(entry["step"], entry[what][tensor]["learned"], label=entry["name"])
                axes.plot(entry["step"], entry[what][tensor]["even"], "--", color="gray", alpha=0.6, linewidth=1)
            for step in errors[-1]["learn_at"]:
                axes.axvline(step, linestyle=":", color="gray", linewidth=0.8)
            axes.set_title(f"{what} in {bits} bits, {label}", fontsize=9)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
    panels[-1][0].set_xlabel("step")
    panels[-1][1].set_xlabel("step")
    panels[0][0].set_ylabel("relative L2 error")
    panels[1][0].set_ylabel("relative L2 error")
    panels[0][0].legend(fontsize=8, title="dashed: even levels of the same run", title_fontsize=7)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pictures.shrink(path)
    pyplot.close(figure)
