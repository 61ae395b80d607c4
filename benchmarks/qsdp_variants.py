"""QSDP's variants: fewer bits with and without buckets, the quantized master copy, learned levels, accumulation.

Runs, each a pair of processes over loopback: for each seed exact, W4G4 with buckets of 1024 and with one bucket a tensor, and
8-bit weights whose decoded values are the master copy, by the nearest value and by a shifted lattice; for the first
seed other pairs of bits and other buckets, which no gate judges; then a run that learns 3-bit levels, one whose
codecs are timed, and one step of four accumulated micro-batches.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

import accumulation_rank
import codec_share_rank
import launch
import levels_rank
from fsdp_rank import Configuration
from qsdp import HASHED_STEPS, RANKS, curve, hashes, run
from report import Gate

LEARNING_BATCH = 128  # a rank: a step that computes more than it waits
TABLE_SEEDS = 1  # of what the table has beside the claims
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


def measure(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """Runs everything; prints a row a run.

    Args:
        quick: the hashed steps only, without TABLE, and no gate on perplexity, which has not parted.
        seeds: Number of paired seeds.

    Returns:
        `configurations`, `curves`, `levels`, `codec_share` and `accumulation` for the JSON, and the gates.
    """
    steps = HASHED_STEPS if quick else 400
    print(f"# {'run':<28}{'seed':>6}{'steps':>7}{'perplexity':>12}{'weights MB':>12}{'gradients MB':>14}{'seconds':>9}")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in (VARIANTS if quick else VARIANTS | TABLE)}
    for seed in range(seeds):
        common = {"seed": seed, "steps": steps, "hashed_steps": 0 if seed else HASHED_STEPS}
        for name in runs if seed < TABLE_SEEDS else VARIANTS:
            runs[name].append(run(name, dataclasses.replace((VARIANTS | TABLE)[name], **common)))
    gates = [] if quick else perplexity_gates(runs)
    for name in BOUNDS:
        apart = sum(len(set(step)) != 1 for step in hashes(runs[name][0], "gathered"))
        gates.append(
            Gate(f"steps of {HASHED_STEPS} in which the ranks of {name} see different weights", apart, "==", 0)
        )
    levels = launch.run(
        levels_rank.train, ranks=RANKS, deadline_s=600, world=RANKS, steps=12 if quick else 40, batch=LEARNING_BATCH
    )
    gates += level_gates(levels)
    share = launch.run(
        codec_share_rank.train, ranks=RANKS, deadline_s=600, world=RANKS, steps=SHARE_STEPS, batch=SHARE_BATCH
    )
    gates.append(share_gate(share))
    accumulation = launch.run(accumulation_rank.exchanges, ranks=RANKS, deadline_s=120, world=RANKS)[0]
    gates += accumulation_gates(accumulation)
    return {
        "ranks": RANKS,
        "configurations": {name: dataclasses.asdict(entries[0]["configuration"]) for name, entries in runs.items()},
        "drawn": list(VARIANTS),
        "curves": [curve(entry) for entries in runs.values() for entry in entries],
        "levels": levels,
        "codec_share": share,
        "accumulation": accumulation,
    }, gates


def perplexity_gates(runs: dict[str, list[dict[str, Any]]]) -> list[Gate]:
    """Of the mean ratio over seeds, a bound from above one standard error higher; prints the ratios of all runs."""
    gates = []
    for name, entries in runs.items():
        baseline, op, bound = BOUNDS.get(name, ("exact", "", 0.0))
        if name in ("exact", "exact, slow"):
            continue
        pairs = zip(entries, runs[baseline], strict=False)  # fewer seeds than the baseline has
        ratios = [q["ranks"][0]["perplexity"] / e["ranks"][0]["perplexity"] for q, e in pairs]
        mean = statistics.mean(ratios)
        error = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else 0.0
        spread = ", ".join(f"{ratio:.4f}" for ratio in ratios)
        said = f"mean {mean:.4f}, standard error {error:.4f} over seeds" if len(ratios) > 1 else "of one seed"
        print(f"# perplexity ratio {name} / {baseline}: {said} ({spread})")
        if op == "<":
            gate = f"perplexity ratio {name} / {baseline}, bound {bound} + a standard error"
            gates.append(Gate(gate, mean, op, bound + error))
        elif op:
            gates.append(Gate(f"perplexity ratio {name} / {baseline}", mean, op, bound))
    return gates


def level_gates(ranks: list[dict[str, Any]]) -> list[Gate]:
    """Relative to even levels over all ranks' shards; to a step on the slowest rank."""
    gates = []
    for what in ("weights", "gradients"):
        learned, even = (sum(rank[what][i] for rank in ranks) for i in (0, 1))
        gates.append(Gate(f"L2 error of learned / even levels, 3 bits, {what}", math.sqrt(learned / even), "<", 0.85))
    cost = max(rank["learning_s"] / rank["step_s"] for rank in ranks)
    gates.append(Gate(f"processor time of learning / of a step, batch {LEARNING_BATCH} a rank", cost, "<", 0.03))
    return gates


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
