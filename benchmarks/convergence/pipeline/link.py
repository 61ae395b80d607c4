"""Seconds a step of the runs of `convergence aq` and `aq_replicas` on links, and to the same loss.

A step is its schedule's, simulated by torch_lowcomm/planner/schedule.py: with the times of this machine's stages, measured here,
and with those of the paper's pipeline; messages have the bits that the runs have sent, first visits and frames included. Coding
costs no time. Replicas average behind the step, each byte by the same link.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import model
import torch
from linklab.link import goodput_bits, parse_bits
from pipelines.compute import alone
from stages import Part
from subspace.target_steps import falling, loss_at, steps_to
from tables import Columns

from convergence.pipeline.rank import CONTEXT, WIDTH
from torch_lowcomm.planner import schedule as bound

RATES = ("10mbit", "100mbit", "500mbit", "10gbit")
SHARES = (0.6, 0.8)  # of the exact run's steps to its least validation loss: its losses there are the targets
_TURNS = 20
_SETTING = ", fine-tuning, 4 stages"  # of the runs of `convergence aq` that are drawn


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A pipeline under 1F1B: seconds of a micro-batch by stage, elements of a message, and parameters of the largest stage."""

    micro_batches: int
    forward_s: Sequence[float]
    backward_s: Sequence[float]
    elements: int
    parameters: float

    def step_s(self, rate: str, run: Mapping[str, Any]) -> float:
        """Seconds of a step whose messages have the bits an element of a run, and of the average of its replicas behind it."""
        stages, bytes_per_s = len(self.forward_s), goodput_bits(parse_bits(rate) or 0) / 8
        orders = [bound.order("1F1B", stage, stages, self.micro_batches) for stage in range(stages)]
        sizes = ([self.elements * bits / 8] * (stages - 1) for bits in (run["forward_bits"], run["backward_bits"]))
        times = bound.Times(self.forward_s, self.backward_s, *sizes)
        average_s = self.parameters * run.get("replicas_bits", 0.0) / 8 / bytes_per_s
        return bound.step_s(orders, times, bound.Direction(bytes_per_s, 0.0)) + average_s


# GPT2-XL in 8 stages, 32 micro-batches of one sequence (section 4.2 and Appendix C); the backward's time has its recomputation.
PAPER = Pipeline(32, [0.045] * 8, [0.135] * 8, 1024 * 1600, 1.5e9 / 8)
PAPERS = "GPT2-XL in 8 stages; the paper's own: 4.3 times at 100 Mbit/s, 4.9 with QuantizedAdam"


def here(configuration: Mapping[str, Any]) -> Pipeline:
    """The pipeline of a run, its stages timed by themselves on this machine."""
    stages, micro_batches = configuration["stages"], configuration["micro_batches"]
    samples, gpt = configuration["batch"] // micro_batches, model.GPT()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a rank of the runs
    times, parameters = [], []
    for stage in range(stages):
        module = Part(gpt, stage, stages)
        parameters.append(sum(parameter.numel() for parameter in module.parameters()))
        x = torch.randn(samples, CONTEXT, WIDTH) if stage else torch.zeros(samples, CONTEXT, dtype=torch.int64)
        turns = [alone(module, x, last=stage == stages - 1) for _ in range(_TURNS)]
        times.append([min(of) for of in zip(*turns, strict=True)])  # others' work makes a turn longer only
    torch.set_num_threads(threads)
    forward, backward = (list(of) for of in zip(*times, strict=True))
    return Pipeline(micro_batches, forward, backward, samples * CONTEXT * WIDTH, max(parameters))


def drawn(content: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The first seed's curves of the runs that are drawn, the exact one first."""
    first = {curve["name"]: curve for curve in content["curves"] if curve["seed"] == 0}
    chosen = {name: curve for name, curve in first.items() if name.endswith(_SETTING)}
    if next(iter(first.values())).get("replicas_bits"):
        chosen = {name: curve for name, curve in first.items() if not name.endswith((", global", ", DiLoCoX"))}
    return dict(sorted(chosen.items(), key=lambda item: not item[0].startswith("exact")))


def step_seconds(content: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """{"rate, pipeline": {run's name: seconds a step}} of the JSON's runs that are drawn; {} and a sentence without any."""
    runs = drawn(content)
    if not runs:
        print("# no loss against seconds: expected runs of fine-tuning in 4 stages (--only fine_tuning), got none")
        return {}
    pipelines = {"here": here(content["configurations"][next(iter(runs))]), "paper": PAPER}
    return {
        f"{rate}, {where}": {name: pipeline.step_s(rate, run) for name, run in runs.items()}
        for where, pipeline in pipelines.items()
        for rate in RATES
    }


def compared(content: Mapping[str, Any], seconds: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """Prints, by link, seconds to the losses that exact training has at SHARES; the rows of the JSON.

    The loss is validation by exact messages, the mean over seeds.
    """
    curves = {}
    for name in drawn(content):
        of_name = [curve for curve in content["curves"] if curve["name"] == name]
        mean = [statistics.mean(of) for of in zip(*(curve["validations"] for curve in of_name), strict=True)]
        least = mean.index(min(mean)) + 1  # what comes behind it is learned by heart
        curves[name] = of_name[0]["step"][:least], falling(mean[:least])
    exact = next(iter(curves))
    steps, loss = curves[exact]
    targets = [loss_at(steps, loss, max(steps[0], share * steps[-1])) for share in SHARES]
    print(
        f"# simulated ({PAPERS}). Seconds to a validation loss of {' and '.join(f'{target:.4f}' for target in targets)}:"
    )
    columns = Columns(
        f"run 45 | link, stages of 18 | s a step 10.4f{' | steps 9.1f | seconds 11.2f | times as fast 15.2f' * 2}"
    )
    print(columns.heading())
    rows = []
    for link, by_name in seconds.items():
        for name, step_s in by_name.items():
            row: dict[str, Any] = {"name": name, "link": link, "step_s": step_s, "to": []}
            cells: list[float | None] = []
            for target in targets:
                needed, base = steps_to(*curves[name], target), steps_to(steps, loss, target)
                reached = {"target": target, "steps": needed, "seconds": None, "times": None}
                if needed is not None:
                    reached |= {"seconds": needed * step_s, "times": by_name[exact] * base / (needed * step_s)}
                row["to"].append(reached)
                cells += [reached[key] for key in ("steps", "seconds", "times")]
            rows.append(row)
            print(columns.row(name, link, step_s, *cells))
    return rows
