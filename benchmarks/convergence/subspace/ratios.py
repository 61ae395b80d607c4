"""Loss after as many seconds on a slow link: the runs of the part `ratios` of `convergence subspace`, and a table of who wins.

A step is GPipe's, simulated by torch_lowcomm/planner/schedule.py with the times of a stage of each kind, measured on this
machine, and of one that computes FASTER times as fast; messages have the bytes that the runs have sent. Coding costs no time.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import model
from linklab.link import goodput_bits
from subspace import stage_seconds
from subspace.stage_seconds import StageSeconds
from subspace.target_steps import loss_at
from tables import Columns

from convergence.subspace.presets import BY_SECONDS
from torch_lowcomm.planner import schedule as bound

CONTEXT = model.Config().context
RATE = 80e6  # bits a second of each direction of each link, as the paper's
FASTER = 10
SHARES = (0.25, 0.5, 1.0)  # of the seconds that the fastest run takes
_TURNS = 20


def step_s(run: Mapping[str, Any], configuration: Mapping[str, Any], stage: StageSeconds, rate: float = RATE) -> float:
    """Simulated seconds of a step of a run, whose kind has these stages, at a rate in bits a second, headers included."""
    stages, micro_batches = configuration["stages"], configuration["micro_batches"]
    tokens = configuration["batch"] * CONTEXT / micro_batches
    forward, backward = (
        [tokens * s for s in (*[middle] * (stages - 1), last)] for middle, last in (stage.forward, stage.backward)
    )
    messages = [tokens * run["token_bytes"]] * (stages - 1)
    orders = [bound.order("GPipe", index, stages, micro_batches) for index in range(stages)]
    link = bound.Direction(goodput_bits(rate) / 8, 0.0)
    return bound.step_s(orders, bound.Times(forward, backward, messages, messages), link)


def step_seconds(content: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """{"80 Mbit/s, stages": {run's name: seconds a step}} of the JSON's runs of the part; {} and a sentence without any."""
    runs = {curve["name"]: curve for curve in content["curves"] if curve["name"] in BY_SECONDS}
    if not runs:
        print("# no loss against seconds: expected runs of the part ratios (--only ratios), got none")
        return {}
    width = next(iter(content["configurations"][name] for name in runs))["width"]
    here = stage_seconds.measure(width=width, vocabulary=model.VOCABULARY, context=CONTEXT, repetitions=_TURNS)
    speeds = {
        "stages as here": here,
        f"{FASTER} times as fast": {kind: stage.faster(FASTER) for kind, stage in here.items()},
    }
    return {
        f"{RATE / 1e6:.0f} Mbit/s, {speed}": {
            name: step_s(run, content["configurations"][name], of_kind[content["configurations"][name]["kind"]])
            for name, run in runs.items()
        }
        for speed, of_kind in speeds.items()
    }


def compared(content: Mapping[str, Any], seconds: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """Prints each run's validation loss at three times, and who has the least; the rows of the JSON.

    The latest time is when the fastest run ends, so that all runs have a loss there, or an earlier one.
    """
    rows = []
    for link, by_name in seconds.items():
        curves = {name: [c for c in content["curves"] if c["name"] == name] for name in by_name}
        end = min(step_s * curves[name][0]["step"][-1] for name, step_s in by_name.items())
        times = [share * end for share in SHARES]
        at_times = " | ".join(f"{at:.1f} s 10.4f" for at in times)
        columns = Columns(f"run 30 | bytes a token 14.1f | s a step 10.4f | {at_times}")
        print(f"# {link}: validation loss after as many seconds\n{columns.heading()}")
        found = {}
        for name, step_s in by_name.items():
            mean = [statistics.mean(of) for of in zip(*(c["validations"] for c in curves[name]), strict=True)]
            losses = [loss_at(curves[name][0]["step"], mean, at / step_s) for at in times]
            found[name] = losses
            print(columns.row(name, curves[name][0]["token_bytes"], step_s, *losses))
            rows.append({"name": name, "link": link, "step_s": step_s, "seconds": times, "losses": losses})
        for i, at in enumerate(times):
            reached = {name: losses[i] for name, losses in found.items() if losses[i] is not None}
            print(f"# least after {at:.1f} s: {min(reached, key=lambda name: reached[name])}" if reached else "")
    return rows
