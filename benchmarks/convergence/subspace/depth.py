"""Constrained decoders of 8, 16 and 32 blocks next to free ones: loss, and the stable rank of projections over training.

The paper's Figures 1 and 3 at our scale. Each decoder is cut into two stages, so that a stage has 4, 8 and 16 blocks: gradients
are projected at the one boundary between them, and inside a stage by the optimizer alone.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from report import Gate

from convergence.subspace.rank import Configuration
from convergence.subspace.runs import curve, train

DEPTHS = (8, 16, 32)
STEPS, RANK_EVERY = 300, 100
MOST = 1.05  # that the ratio constrained / free of the deepest decoders may be above that of the shallowest


def configurations(*, quick: bool) -> dict[str, Configuration]:
    """By name. Width 128, so that k = 16 is d / 8."""
    size = {"width": 128, "stages": 2, "micro_batches": 2, "steps": STEPS, "rank_every": RANK_EVERY}
    if quick:
        size |= {"width": 64, "steps": 40, "rank_every": 20, "validation": 16}
    named = {}
    for layers in (2, 4) if quick else DEPTHS:
        named[f"free, {layers} blocks"] = Configuration("whole", layers=layers, **size)
        named[f"constrained, {layers} blocks"] = Configuration(
            "constrained", rank=size["width"] // 8, layers=layers, **size
        )
    return named


def measure(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """Runs everything; prints a row a run.

    Args:
        quick: Shallow decoders, few steps.
        seeds: Of every run.

    Returns:
        `configurations` and `curves` for the JSON, and the gates.
    """
    named = configurations(quick=quick)
    looks = next(iter(named.values()))
    steps = [*range(0, looks.steps, looks.rank_every), looks.steps]
    after = "".join(f"{step:>8}" for step in steps)
    print(f"# {'':<33}{'loss (nats a byte)':^20}  stable rank of `down` after so many steps")
    print(f"# {'run':<29}{'seed':>4}{'training':>10}{'validation':>10}  {after}{'stream':>8}{'seconds':>9}")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in named}
    for seed in range(seeds):
        for name, configuration in named.items():
            (run,) = train([configuration], seed)
            runs[name].append({"name": name, **run})
            print(row(name, run), flush=True)
    return {
        "configurations": {name: dataclasses.asdict(configuration) for name, configuration in named.items()},
        "curves": [curve(run) for of_name in runs.values() for run in of_name],
    }, gates(runs, [configuration.layers for configuration in named.values()][::2])


def row(name: str, run: Mapping[str, Any]) -> str:
    """The row of a run."""
    ranks = "".join(f"{rank:>8.1f}" for rank in (*run["down_ranks"], run["down_rank"]))
    return (
        f"  {name:<29}{run['seed']:>4}{run['loss'][-1]:>10.4f}{run['validation']:>10.4f}  {ranks}{run['stream_rank']:>8.1f}"
        f"{run['seconds'][-1]:>9.1f}"
    )


def gates(runs: Mapping[str, Sequence[Mapping[str, Any]]], depths: Sequence[int]) -> list[Gate]:
    """Prints constrained / free by depth; depth may not widen the distance, nor the projections keep their rank."""
    ratio = {}
    for layers in depths:
        by_seed = [
            constrained["validation"] / free["validation"]
            for constrained, free in zip(
                runs[f"constrained, {layers} blocks"], runs[f"free, {layers} blocks"], strict=True
            )
        ]
        ratio[layers] = statistics.mean(by_seed)
        print(f"# validation, constrained / free, {layers} blocks: {', '.join(f'{one:.4f}' for one in by_seed)}")
    first, last = depths[0], depths[-1]
    shares = [
        run["down_rank"] / run["down_ranks"][0] for name, of_name in runs.items() for run in of_name if "free" in name
    ]
    return [
        Gate(f"constrained / free, {last} blocks over {first}", ratio[last] / ratio[first], "<=", MOST),
        Gate("stable rank of `down`, free, end / first weights", statistics.mean(shares), "<", 1.0),
    ]
