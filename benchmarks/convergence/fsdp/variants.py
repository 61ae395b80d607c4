"""QSDP's variants: fewer bits with and without buckets, the quantized master copy, learned levels, accumulation.

Runs, each a pair of processes over loopback: for each seed exact, W4G4 with buckets of 1024 and with one bucket a tensor, and
8-bit weights whose decoded values are the master copy, by the nearest value and by a shifted lattice; for the first
seed other pairs of bits and other buckets, which no gate judges; then a run that learns 3-bit levels, one whose
codecs are timed, and one step of four accumulated micro-batches.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import launch
from report import Gate

from convergence import paired
from convergence.fsdp import accumulation_rank, codec_share_rank, levels_rank
from convergence.fsdp.rank import Configuration
from convergence.fsdp.runs import HASHED_STEPS, RANKS, curve, hashes, print_heading, run

QUICK = ("W4G4/1024", "lattice master")
FEW = {"steps": 6, "validation_batches": 1}  # with --quick
LEARNING_BATCH = 128  # a rank: a step that computes more than it waits
TABLE_SEEDS = 1  # of what the table has next to the claims
SHARE_BATCH, SHARE_STEPS = 64, 22  # a rank: the smallest batch of the claim on the codecs' time
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
TABLE = {
    "W6G4/1024": Configuration(weights="minmax6:bucket=1024", gradients="qsgd4:bucket=1024"),
    "W5G4/1024": Configuration(weights="minmax5:bucket=1024", gradients="qsgd4:bucket=1024"),
    "W4G32/1024": Configuration(weights="minmax4:bucket=1024"),
    "W4G4/128": Configuration(weights="minmax4:bucket=128", gradients="qsgd4:bucket=128"),
    "W4G4/65536": Configuration(weights="minmax4:bucket=65536", gradients="qsgd4:bucket=65536"),
}
# Perplexity / that of the named exact run of the same seed, over 400 steps.
BOUNDS = {
    "W4G4/1024": ("exact", "<", 1.03),
    "W4G4/flat buffer": ("exact", ">", 1.2),
    "nearest master": ("exact, slow", ">", 1.1),
    "lattice master": ("exact, slow", "<", 1.1),
}


def measure(*, quick: bool, seeds: int, only: str = "") -> tuple[dict[str, Any], list[Gate]]:
    """Runs everything, or `only` one of PARTS; prints a row a run.

    Args:
        quick: QUICK alone, for a few steps that are all hashed, without TABLE, and neither a gate on perplexity, which has
            not parted, nor one on time.
        seeds: Number of paired seeds.
        only: A part. Processor time counts on a quiet machine alone, so that `timing` can be asked for by itself.

    Returns:
        `configurations` and `curves`, `levels` and `codec_share`, and `accumulation` for the JSON, and the gates.
    """
    content: dict[str, Any] = {"ranks": RANKS}
    gates: list[Gate] = []
    for part, run_part in PARTS.items():
        if only in ("", part):
            found, passed = run_part(quick=quick, seeds=seeds)
            content |= found
            gates += passed
    return content, gates


def train_all(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """The part `training`: perplexities, and what ranks see in the first steps."""
    size, hashed = (FEW, FEW["steps"]) if quick else ({"steps": 400}, HASHED_STEPS)
    print_heading()
    presets = {name: VARIANTS[name] for name in QUICK} if quick else VARIANTS | TABLE
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in presets}
    for seed in range(seeds):
        common = {"seed": seed, **size, "hashed_steps": 0 if seed else hashed}
        for name, preset in presets.items():
            if seed < TABLE_SEEDS or name not in TABLE:
                runs[name].append(run(name, dataclasses.replace(preset, **common)))
    gates = [] if quick else perplexity_gates(runs)
    for name in (name for name in BOUNDS if name in runs):
        apart = sum(len(set(step)) != 1 for step in hashes(runs[name][0], "gathered"))
        gates.append(Gate(f"steps of {hashed} in which the ranks of {name} see different weights", apart, "==", 0))
    return {
        "configurations": {name: dataclasses.asdict(entries[0]["configuration"]) for name, entries in runs.items()},
        "drawn": list(VARIANTS),
        "curves": [curve(entry) for entries in runs.values() for entry in entries],
    }, gates


def time_all(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """The part `timing`: what learned levels gain and cost, and the codecs' share of a step."""
    batch, steps = (8, 6) if quick else (LEARNING_BATCH, 40)
    levels = launch.run(levels_rank.train, ranks=RANKS, deadline_s=600, world=RANKS, steps=steps, batch=batch)
    if quick:
        return {"levels": levels}, error_gates(levels, 0.95)
    share = launch.run(
        codec_share_rank.train, ranks=RANKS, deadline_s=600, world=RANKS, steps=SHARE_STEPS, batch=SHARE_BATCH
    )
    return {"levels": levels, "codec_share": share}, [*error_gates(levels, 0.85), cost_gate(levels), share_gate(share)]


def count_accumulation(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """The part `accumulation`: exchanges and bytes of one step."""
    found = launch.run(accumulation_rank.exchanges, ranks=RANKS, deadline_s=120, world=RANKS)[0]
    return {"accumulation": found}, accumulation_gates(found)


def perplexity_gates(runs: dict[str, list[dict[str, Any]]]) -> list[Gate]:
    """Of the mean ratio over seeds, a bound from above one standard error higher; prints the ratios of all runs."""
    gates = []
    for name, entries in runs.items():
        baseline, op, bound = BOUNDS.get(name, ("exact", "", 0.0))
        if name in ("exact", "exact, slow"):
            continue
        found = paired.ratio(entries, runs[baseline])
        print(f"# perplexity ratio {name} / {baseline}: {found.said()}")
        if op == "<":
            gate = f"perplexity ratio {name} / {baseline}, bound {bound} + a standard error"
            gates.append(Gate(gate, found.mean, op, bound + found.error))
        elif op:
            gates.append(Gate(f"perplexity ratio {name} / {baseline}", found.mean, op, bound))
    return gates


def error_gates(ranks: list[dict[str, Any]], bound: float) -> list[Gate]:
    """Relative to even levels over all ranks' shards."""
    gates = []
    for what in ("weights", "gradients"):
        learned, even = (sum(rank[what][i] for rank in ranks) for i in (0, 1))
        gates.append(Gate(f"L2 error of learned / even levels, 3 bits, {what}", math.sqrt(learned / even), "<", bound))
    return gates


def cost_gate(ranks: list[dict[str, Any]]) -> Gate:
    """Relative to a step on the slowest rank."""
    cost = max(rank["learning_s"] / rank["step_s"] for rank in ranks)
    return Gate(f"processor time of learning / of a step, batch {LEARNING_BATCH} a rank", cost, "<", 0.03)


def share_gate(ranks: list[dict[str, float]]) -> Gate:
    """Of the slower rank."""
    share = max(rank["codec_s"] / rank["step_s"] for rank in ranks)
    return Gate(f"time of codecs / of a step, W8G8, batch {SHARE_BATCH} a rank", share, "<", 0.01)


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


PARTS = {"training": train_all, "timing": time_all, "accumulation": count_accumulation}
