"""QSDP's variants: fewer bits with and without buckets, the quantized master copy, learned levels, accumulation.

Runs, each a pair of processes over loopback: for each of at most two seeds exact, W4G4 with buckets of 1024 and with one
bucket a tensor, and 8-bit weights whose decoded values are the master copy, by the nearest value and by a shifted lattice;
then a run that learns 3-bit levels, and one step of four accumulated micro-batches.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

import accumulation_rank
import launch
import levels_rank
from fsdp_rank import Configuration
from qsdp import HASHED_STEPS, RANKS, curve, hashes, run
from report import Gate

LEARNING_BATCH = 128  # a rank: a step that computes more than it waits
MOST_SEEDS = 2  # the claims' margins are many times what seeds differ by
# Most tensors' grid of 8 bits has a half step of 3.5e-4 at first: AdamW's steps at 1e-3 are above it until late in a run, and
# the nearest master loses little.
SLOW = 3e-4
VARIANTS = {
    "exact": Configuration(),
    "W4G4/1024": Configuration(weights="minmax4:bucket=1024", gradients="qsgd4:bucket=1024"),
    "W4G4/tensor": Configuration(weights="minmax4:bucket=tensor", gradients="qsgd4:bucket=tensor"),
    # Flat buffers as FSDP2 moves them, norms and all, each with one scale: what quantize() is there to avoid.
    "W4G4/flat buffer": Configuration(policy="all_gather=minmax4:bucket=tensor; reduce_scatter=qsgd4:bucket=tensor"),
    "exact, slow": Configuration(lr=SLOW),
    "nearest master": Configuration(
        weights="minmax8:bucket=1024", gradients="qsgd8:bucket=1024", master="quantized", lr=SLOW
    ),
    "lattice master": Configuration(
        weights="lattice8:bucket=1024", gradients="qsgd8:bucket=1024", master="quantized", lr=SLOW
    ),
}
# Perplexity / that of the named exact run of the same seed, over 400 steps.
BOUNDS = {
    "W4G4/1024": ("exact", "<", 1.03),
    "W4G4/flat buffer": ("exact", ">", 1.2),
    "nearest master": ("exact, slow", ">", 1.1),
    "lattice master": ("exact, slow", "<", 1.1),
}


def measure(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """Runs everything; prints a row a run. `quick`: the hashed steps only, and no gate on perplexity, which has not parted.

    Returns:
        `configurations`, `curves`, `levels` and `accumulation` for the JSON, and the gates.
    """
    steps = HASHED_STEPS if quick else 400
    print(f"# {'run':<28}{'seed':>6}{'steps':>7}{'perplexity':>12}{'weights MB':>12}{'gradients MB':>14}{'seconds':>9}")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    for seed in range(min(seeds, MOST_SEEDS)):
        common = {"seed": seed, "steps": steps, "hashed_steps": 0 if seed else HASHED_STEPS}
        for name, configuration in VARIANTS.items():
            runs[name].append(run(name, dataclasses.replace(configuration, **common)))
    gates = [] if quick else [perplexity_gate(name, runs) for name in BOUNDS]
    for name in BOUNDS:
        apart = sum(len(set(step)) != 1 for step in hashes(runs[name][0], "gathered"))
        gates.append(
            Gate(f"steps of {HASHED_STEPS} in which the ranks of {name} see different weights", apart, "==", 0)
        )
    levels = launch.run(
        levels_rank.train, ranks=RANKS, deadline_s=600, world=RANKS, steps=12 if quick else 40, batch=LEARNING_BATCH
    )
    gates += level_gates(levels)
    accumulation = launch.run(accumulation_rank.exchanges, ranks=RANKS, deadline_s=120, world=RANKS)[0]
    gates += accumulation_gates(accumulation)
    return {
        "ranks": RANKS,
        "configurations": {name: dataclasses.asdict(entries[0]["configuration"]) for name, entries in runs.items()},
        "curves": [curve(entry) for entries in runs.values() for entry in entries],
        "levels": levels,
        "accumulation": accumulation,
    }, gates


def perplexity_gate(name: str, runs: dict[str, list[dict[str, Any]]]) -> Gate:
    """Of the mean ratio over seeds."""
    baseline, op, bound = BOUNDS[name]
    pairs = zip(runs[name], runs[baseline], strict=True)
    ratios = [q["ranks"][0]["perplexity"] / e["ranks"][0]["perplexity"] for q, e in pairs]
    return Gate(f"perplexity ratio {name} / {baseline}", statistics.mean(ratios), op, bound)


def level_gates(ranks: list[dict[str, Any]]) -> list[Gate]:
    """Relative to even levels over all ranks' shards; to a step on the slowest rank."""
    gates = []
    for what in ("weights", "gradients"):
        learned, even = (sum(rank[what][i] for rank in ranks) for i in (0, 1))
        gates.append(Gate(f"L2 error of learned / even levels, 3 bits, {what}", math.sqrt(learned / even), "<", 0.85))
    cost = max(rank["learning_s"] / rank["step_s"] for rank in ranks)
    gates.append(Gate(f"processor time of learning / of a step, batch {LEARNING_BATCH} a rank", cost, "<", 0.03))
    return gates


def accumulation_gates(found: dict[str, Any]) -> list[Gate]:
    """Exchanges and bytes of a step of four micro-batches that reduces gradients with the last."""
    gates = []
    for name, weights in (("default", 8), ("kept", 5)):
        counted = found[name]
        exchanges = counted["gathers"] / counted["reductions"]
        gates.append(Gate(f"accumulation 4, {name}: weight exchanges to a gradient exchange", exchanges, "==", weights))
        for op in ("weights", "gradients"):
            ratio = counted[f"{op}_bytes"] / counted[f"{op}_payload"]
            gates.append(Gate(f"accumulation 4, {name}: bytes of {op} / FORMAT.md's payload", ratio, "<", 1.01))
    return gates
