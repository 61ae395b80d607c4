"""Seed replay: loss, and the bytes of each machine, next to methods that send tensors; four real processes over loopback.

The runs are those of presets.py on the task of task.py. The runs of a seed follow one another in the
same processes.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import launch
import paired
from report import Gate
from tables import Columns

from convergence.seed_replay import rank as seed_replay_rank
from convergence.seed_replay.presets import PRESETS, QUICK
from convergence.seed_replay.rank import Configuration

Run = Mapping[str, Any]
Runs = Mapping[str, Sequence[Run]]  # by name, a seed each
BITS = {"none": 32, "fp16": 16, "log9": 9, "logbyte": 8, "sign1": 2}  # of a code, n of them packed
# Loss of a run / of another: reported next to the gates, as they are.
REPORTED = (
    ("sign", "float"),
    ("Gaussian", "byte"),
    ("in place", "byte"),
    ("send_full_grad", "byte"),
    ("best η", "DDP, best rate"),
    ("tuned, byte, best η", "tuned, DDP, best rate"),
)
COLUMNS = Columns("run 24 | seed 5 | loss 9.4f | gradients 11 | payload, B 12.0f | sent, kB 11.1f | seconds 9.1f")


def measure(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """Runs everything; prints a row a run.

    `quick`: a quarter of the iterations, a few runs, and looser bounds on losses.
    """
    presets = PRESETS
    if quick:
        presets = {n: dataclasses.replace(PRESETS[n], iterations=PRESETS[n].iterations // 4) for n in QUICK}
    print(COLUMNS.heading())
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in presets}
    for seed in range(seeds):
        for name, run in of_seed(presets, seed):
            runs[name].append(run)
    return {
        "configurations": {name: dataclasses.asdict(c) for name, c in presets.items()},
        "curves": [curve(name, run) for name, of_name in runs.items() for run in of_name],
    }, gates(runs, quick=quick)


def of_seed(presets: Mapping[str, Configuration], seed: int) -> list[tuple[str, dict[str, Any]]]:
    """All runs of a seed, in fresh processes that do one after another."""
    configurations = [dataclasses.replace(c, seed=seed) for c in presets.values()]
    returned = launch.run(
        seed_replay_rank.train,
        ranks=configurations[0].machines,
        deadline_s=60 + 120 * len(presets),
        configurations=configurations,
    )
    runs = []
    for name, c, *machines in zip(presets, configurations, *returned, strict=True):
        first = machines[0]
        payload = statistics.mean(machine["payload"] for machine in machines)
        sent = statistics.mean(machine["bytes"][-1] for machine in machines) / 1e3
        print(
            COLUMNS.row(name, seed, first["loss"][-1], first["gradients"], payload, sent, first["seconds"][-1]),
            flush=True,
        )
        runs.append((name, {"configuration": c, "machines": machines}))
    return runs


def last(run: Run) -> float:
    """The loss at the end (of every machine the same, for their parameters are)."""
    return float(run["machines"][0]["loss"][-1])


def gates(runs: Runs, *, quick: bool) -> list[Gate]:
    """All of them; `quick` has looser bounds on losses, for a quarter of the iterations."""

    def ratio(name: str, other: str) -> paired.Ratio:
        return paired.ratio(last, runs[name], runs[other]).show(f"loss {name} / {other}")

    for name, other in REPORTED:
        if name in runs and other in runs:
            ratio(name, other)
    found = []
    for name in ("byte", "log9"):
        away, bound = ratio(name, "float"), 0.04 if quick else 0.02
        title = f"|loss {name} / float - 1|, bound {bound} + a standard error"
        found.append(Gate(title, abs(away.mean - 1), "<", bound + away.error))
    for name, other in (("byte", "DDP"), ("tuned, byte", "tuned, DDP")):
        found.append(ratio(name, other).gate(f"loss {name} / {other}", "<", 1.1 if quick else 1.01))
    learned = max(last(run) / run["machines"][0]["loss"][0] for run in runs["byte"])
    every = [run for of_name in runs.values() for run in of_name]
    return [
        *found,
        Gate("loss of `byte` after / before, largest", learned, "<", 0.8 if quick else 0.05),
        Gate("iterations at which machines' parameters differ, all runs", sum(map(unequal, every)), "==", 0),
        Gate("bytes of gradients received - by the formula, all runs", sum(map(off_formula, every)), "==", 0),
    ]


def unequal(run: Run) -> int:
    """Points of the curve at which machines of one run have different parameters."""
    return sum(len(set(sums)) > 1 for sums in zip(*(m["checksum"] for m in run["machines"]), strict=True))


def off_formula(run: Run) -> float:
    """The difference of the codes that machines received in bytes from iterations·M·(M-1)·(bytes of n codes)."""
    c = run["configuration"]
    if c.method != "replay":
        return 0
    codes = math.ceil(c.samples * BITS[c.options.get("codec", "logbyte")] / 8)
    received = sum(machine["payload"] for machine in run["machines"])
    return abs(received - c.iterations * codes * c.machines * (c.machines - 1))


def curve(name: str, run: dict[str, Any]) -> dict[str, Any]:
    """Returns a run as the JSON has it: the first machine's."""
    first = run["machines"][0]
    return {
        "name": name,
        "seed": run["configuration"].seed,
        "gradients": first["gradients"],
        "payload": first["payload"],
        "step": first["iteration"],
        "bytes": first["bytes"],
        "seconds": [round(seconds, 3) for seconds in first["seconds"]],
        "loss": [round(loss, 6) for loss in first["loss"]],
    }
