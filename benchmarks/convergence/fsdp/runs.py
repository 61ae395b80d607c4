"""QSDP's claims: FSDP2 with 8-bit weights and gradients against exact FSDP2, over paired seeds.

Runs, each a pair of processes over loopback: for every seed exact (`none`) and W8G8 with buckets of 1024, equal in
seed, data and steps; then 50 steps of plain FSDP2 on gloo. The first 50 steps of seed 0 hash all parameters.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import launch
import paired
from report import Gate
from tables import Columns

from convergence.fsdp import rank as fsdp_rank
from convergence.fsdp.rank import Configuration

RANKS = 2
EXACT = Configuration()
W8G8 = Configuration(weights="minmax8:bucket=1024", gradients="qsgd8:bucket=1024")
HASHED_STEPS = 50
QUICK = {"steps": 6, "validation_batches": 1}
Runs = dict[str, list[dict[str, Any]]]  # by name, a seed each
COLUMNS = Columns("run 28 | seed 6 | steps 7 | perplexity 12.4f | weights MB 12.2f | gradients MB 14.2f | seconds 9.1f")


def measure(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """Runs everything; prints a row a run.

    `quick`: a few steps, all hashed, in place of 400, and a loose bound on the perplexity ratio.
    """
    size, hashed = (QUICK, QUICK["steps"]) if quick else ({}, HASHED_STEPS)
    print(COLUMNS.heading())
    exact, quantized = [], []
    for seed in range(seeds):
        common = {"seed": seed, "hashed_steps": 0 if seed else hashed, **size}
        exact.append(run("exact", dataclasses.replace(EXACT, **common)))
        quantized.append(run("W8G8/1024", dataclasses.replace(W8G8, **common)))
    plain = run("FSDP2 on gloo", Configuration(backend="gloo", steps=hashed, hashed_steps=hashed))
    found = paired.ratio(perplexity, quantized, exact).show("perplexity ratio W8G8 / exact")
    gates = [Gate("perplexity ratio W8G8 / exact, few steps, loose", found.mean, "<=", 1.1)]
    if not quick:
        worst = max(map(perplexity, exact))
        gates = [
            found.gate("perplexity ratio W8G8 / exact", "<=", 1.01),
            Gate("perplexity of the worst exact run", worst, "<", 6.0),
        ]
    for what in ("weights", "gradients"):
        fewer = sent(what, exact) / sent(what, quantized)
        gates.append(Gate(f"bytes sent for {what}, exact / W8G8", fewer, ">=", 3.9))
    differing = sum(a != b for a, b in zip(hashes(exact[0], "shards"), hashes(plain, "shards"), strict=True))
    gates.append(Gate(f"steps of {hashed} after which `none` differs from FSDP2 on gloo", differing, "==", 0))
    gates.append(apart_gate("W8G8", quantized[0]))
    return {"ranks": RANKS, **to_json({"exact": exact, "W8G8/1024": quantized, "FSDP2 on gloo": [plain]})}, gates


def run_all(presets: Mapping[str, Configuration], seeds: int) -> Runs:
    """Prints the heading, and runs every configuration for every seed, seed after seed."""
    print(COLUMNS.heading())
    runs: Runs = {name: [] for name in presets}
    for seed in range(seeds):
        for name, configuration in presets.items():
            runs[name].append(run(name, dataclasses.replace(configuration, seed=seed)))
    return runs


def run(name: str, configuration: Configuration) -> dict[str, Any]:
    """Runs one configuration in fresh processes and prints its row (bytes: rank 0's)."""
    c = configuration
    ranks = launch.run(
        fsdp_rank.train,
        ranks=RANKS,
        deadline_s=60 + 4.0 * c.steps,
        plain_gloo=c.backend == "gloo",
        world=RANKS,
        configuration=c,
    )
    first = ranks[0]
    megabytes = [first[key][-1] / 1e6 for key in ("weights_bytes", "gradients_bytes")]
    print(COLUMNS.row(name, c.seed, c.steps, first["perplexity"], *megabytes, first["seconds"][-1]), flush=True)
    return {"name": name, "configuration": c, "ranks": ranks}


def perplexity(entry: Mapping[str, Any]) -> float:
    """Of a run."""
    return float(entry["ranks"][0]["perplexity"])


def sent(what: str, runs: Sequence[Mapping[str, Any]]) -> float:
    """Bytes of all runs and ranks for `weights` or `gradients`; nan without any."""
    return sum(rank[f"{what}_bytes"][-1] for entry in runs for rank in entry["ranks"]) or math.nan


def hashes(entry: Mapping[str, Any], key: str) -> list[tuple[str, ...]]:
    """A step's hashes on every rank, step by step."""
    return list(zip(*(rank[key] for rank in entry["ranks"]), strict=True))


def apart_gate(name: str, entry: Mapping[str, Any]) -> Gate:
    """All ranks see the same weights in every step that was hashed."""
    steps = hashes(entry, "gathered")
    apart = sum(len(set(step)) != 1 for step in steps)
    return Gate(f"steps of {len(steps)} in which the ranks of {name} see different weights", apart, "==", 0)


def curve(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a run as the JSON has it: rank 0's bytes and seconds, the mean loss, a point a step."""
    first = entry["ranks"][0]
    of_steps = [w + g for w, g in zip(first["weights_bytes"], first["gradients_bytes"], strict=True)]
    return {
        "name": entry["name"],
        "seed": entry["configuration"].seed,
        "perplexity": first["perplexity"],
        "step": list(range(1, len(of_steps) + 1)),
        "bytes": of_steps,
        "weights_bytes": first["weights_bytes"][-1],
        "gradients_bytes": first["gradients_bytes"][-1],
        "seconds": first["seconds"],
        "loss": first["loss"],
    }


def to_json(runs: Runs) -> dict[str, Any]:
    """Returns runs as a JSON has them: `configurations` by name, and `curves`."""
    return {
        "configurations": {name: dataclasses.asdict(of_name[0]["configuration"]) for name, of_name in runs.items()},
        "curves": [curve(entry) for of_name in runs.values() for entry in of_name],
    }
