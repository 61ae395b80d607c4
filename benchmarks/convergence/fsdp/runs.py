"""QSDP's claims: FSDP2 with 8-bit weights and gradients against exact FSDP2, over paired seeds.

Runs, each a pair of processes over loopback: for every seed exact (`none`) and W8G8 with buckets of 1024, equal in
seed, data and steps; then 50 steps of plain FSDP2 on gloo. The first 50 steps of seed 0 hash all parameters.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

import launch
from report import Gate

from convergence import paired
from convergence.fsdp import rank as fsdp_rank
from convergence.fsdp.rank import Configuration

RANKS = 2
EXACT = Configuration()
W8G8 = Configuration(weights="minmax8:bucket=1024", gradients="qsgd8:bucket=1024")
HASHED_STEPS = 50


def measure(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """Runs everything; prints a row a run.

    Args:
        quick: only the steps that are hashed, in place of 400, and a loose bound on the perplexity ratio.
        seeds: Number of paired seeds.

    Returns:
        `configurations` and `curves` for the JSON, and the gates.
    """
    steps = HASHED_STEPS if quick else 400
    print_heading()
    exact, quantized = [], []
    for seed in range(seeds):
        common = {"seed": seed, "steps": steps, "hashed_steps": 0 if seed else HASHED_STEPS}
        exact.append(run("exact", dataclasses.replace(EXACT, **common)))
        quantized.append(run("W8G8/1024", dataclasses.replace(W8G8, **common)))
    plain = run("FSDP2 on gloo", Configuration(backend="gloo", steps=HASHED_STEPS, hashed_steps=HASHED_STEPS))

    gates = perplexity_gates(exact, quantized, quick=quick)
    gates.append(Gate("bytes sent for weights, exact / W8G8", fewer("weights_bytes", exact, quantized), ">=", 3.9))
    gates.append(Gate("bytes sent for gradients, exact / W8G8", fewer("gradients_bytes", exact, quantized), ">=", 3.9))
    differing = sum(a != b for a, b in zip(hashes(exact[0], "shards"), hashes(plain, "shards"), strict=True))
    gates.append(Gate(f"steps of {HASHED_STEPS} after which `none` differs from FSDP2 on gloo", differing, "==", 0))
    apart = sum(len(set(step)) != 1 for step in hashes(quantized[0], "gathered"))
    gates.append(Gate(f"steps of {HASHED_STEPS} in which W8G8's ranks see different weights", apart, "==", 0))
    return {
        "ranks": RANKS,
        "configurations": {
            entry["name"]: dataclasses.asdict(entry["configuration"]) for entry in (exact[0], quantized[0], plain)
        },
        "curves": [curve(entry) for entry in (*exact, *quantized, plain)],
    }, gates


def run_all(presets: dict[str, Configuration], seeds: int) -> dict[str, list[dict[str, Any]]]:
    """Runs every configuration for every seed, seed after seed; by name a run a seed."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in presets}
    for seed in range(seeds):
        for name, configuration in presets.items():
            runs[name].append(run(name, dataclasses.replace(configuration, seed=seed)))
    return runs


def print_heading() -> None:
    """Prints the heading of the rows of `run`."""
    print(f"# {'run':<28}{'seed':>6}{'steps':>7}{'perplexity':>12}{'weights MB':>12}{'gradients MB':>14}{'seconds':>9}")


def run(name: str, configuration: Configuration) -> dict[str, Any]:
    """Runs one configuration in fresh processes and prints its row (bytes: rank 0's)."""
    deadline_s = 60 + 2.0 * configuration.steps
    plain = configuration.backend == "gloo"
    ranks = launch.run(
        fsdp_rank.train, ranks=RANKS, deadline_s=deadline_s, plain_gloo=plain, world=RANKS, configuration=configuration
    )
    first = ranks[0]
    sent = [first[key][-1] / 1e6 for key in ("weights_bytes", "gradients_bytes")]
    print(
        f"  {name:<28}{configuration.seed:>6}{configuration.steps:>7}{first['perplexity']:>12.4f}"
        f"{sent[0]:>12.2f}{sent[1]:>14.2f}{first['seconds'][-1]:>9.1f}",
        flush=True,
    )
    return {"name": name, "configuration": configuration, "ranks": ranks}


def perplexity_gates(exact: list[dict[str, Any]], quantized: list[dict[str, Any]], *, quick: bool) -> list[Gate]:
    """The ratio over paired seeds, its bound one standard error above the claim's."""
    found = paired.ratio(quantized, exact)
    print(f"# perplexity ratio W8G8 / exact: {found.said()}")
    if quick:
        return [Gate(f"perplexity ratio W8G8 / exact, {HASHED_STEPS} steps, loose", found.mean, "<=", 1.1)]
    worst = max(e["ranks"][0]["perplexity"] for e in exact)
    return [
        Gate("perplexity ratio W8G8 / exact, bound 1.01 + a standard error", found.mean, "<=", 1.01 + found.error),
        Gate("perplexity of the worst exact run", worst, "<", 6.0),
    ]


def fewer(key: str, exact: list[dict[str, Any]], quantized: list[dict[str, Any]]) -> float:
    """Bytes of all exact runs over those of all quantized ones, all ranks together."""
    total = [sum(rank[key][-1] for entry in runs for rank in entry["ranks"]) for runs in (exact, quantized)]
    return total[0] / total[1] if total[1] else math.nan


def hashes(entry: dict[str, Any], key: str) -> list[tuple[str, ...]]:
    """A step's hashes on every rank, step by step."""
    return list(zip(*(rank[key] for rank in entry["ranks"]), strict=True))


def curve(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns a run as the JSON has it: rank 0's bytes and seconds, the mean loss, a point a step."""
    first = entry["ranks"][0]
    sent = [w + g for w, g in zip(first["weights_bytes"], first["gradients_bytes"], strict=True)]
    return {
        "name": entry["name"],
        "seed": entry["configuration"].seed,
        "perplexity": first["perplexity"],
        "step": list(range(1, len(sent) + 1)),
        "bytes": sent,
        "weights_bytes": first["weights_bytes"][-1],
        "gradients_bytes": first["gradients_bytes"][-1],
        "seconds": first["seconds"],
        "loss": first["loss"],
    }


def kept(runs: dict[str, list[dict[str, Any]]], *, every: int = 10) -> dict[str, Any]:
    """Returns runs as a JSON has them: `configurations` by name, and `curves` with a point `every` few steps, its mean loss."""
    curves = []
    for entry in (entry for of_name in runs.values() for entry in of_name):
        whole = curve(entry)
        ends = [*range(every, len(whole["step"]), every), len(whole["step"])]
        thin = {key: [whole[key][end - 1] for end in ends] for key in ("step", "bytes", "seconds")}
        starts = [0, *ends[:-1]]
        thin["loss"] = [statistics.mean(whole["loss"][a:b]) for a, b in zip(starts, ends, strict=True)]
        curves.append(whole | thin)
    named = {name: dataclasses.asdict(of_name[0]["configuration"]) for name, of_name in runs.items()}
    return {"configurations": named, "curves": curves}
