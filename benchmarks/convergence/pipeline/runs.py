"""AQ-SGD next to exact messages and to DirectQ: a byte GPT in stages, each a real process over loopback, paired seeds.

The runs are those of presets.py. Some runs of a seed follow one another in the same processes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import launch
from report import Gate

from convergence.pipeline import gates as pipeline_gates
from convergence.pipeline import rank as pipeline_rank
from convergence.pipeline.presets import (
    CLAIMS,
    FINE_TUNING,
    FRESH,
    QUICK,
    SENTENCES,
    STAGES,
    TWO_BITS,
    VARIANTS,
    WIDE,
    shortened,
)
from convergence.pipeline.rank import Configuration

TOGETHER = 4  # runs that the same processes do, and that `--runs` keeps together
ONE_SEED = ("variants", "stages")  # parts; the others have as many as there are
ALONE = ("fine_tuning", "fresh", "wide", "sentences")  # parts that run by `--only` alone, each with a record of its own
RUN_S = 400  # deadline of one run


def measure(*, quick: bool, seeds: int, only: str = "") -> tuple[dict[str, Any], list[Gate]]:
    """Runs all PARTS but ALONE, or `only` one of them; prints a row a run.

    Args:
        quick: Fewer samples, epochs and runs, and bounds that so few steps reach; the part `claims` alone unless `only` is.
        seeds: Of all parts but ONE_SEED.
        only: A part.

    Returns:
        `configurations` and `curves` for the JSON, and the gates.
    """
    print_heading()
    runs: dict[str, list[dict[str, Any]]] = {}
    for part, presets in PARTS.items():
        if part != only and (only or part in ALONE or (quick and part != "claims")):
            continue
        if quick:
            presets = {name: shortened(c) for name, c in presets.items() if name in QUICK or part != "claims"}
        for name, seed, run in of_presets(presets, range(1 if part in ONE_SEED else seeds)):
            runs.setdefault(name, []).append(run | {"name": name, "seed": seed})
    configurations = {name: of_name[0]["configuration"] for name, of_name in runs.items()}
    return {
        "configurations": {name: dataclasses.asdict(c) for name, c in configurations.items()},
        "curves": [curve(run) for of_name in runs.values() for run in of_name],
    }, pipeline_gates.gates(runs, quick=quick)


def print_heading() -> None:
    """Prints the heading of the rows."""
    print(f"# {'':<45}{'':>4}{'loss (nats a byte)':^30}{'bits an element':>17}{'|a-m| / |a|':>14}")
    print(
        f"# {'run':<45}{'seed':>4}{'training':>10}{'samples':>10}{'validation':>12}{'forward':>9}{'backward':>9}"
        f"{'2nd':>7}{'last':>7}{'seconds':>9}"
    )


def of_presets(presets: Mapping[str, Configuration], seeds: Sequence[int]) -> Any:
    """Yields (name, seed, run) of all runs: seeds after one another, in fresh processes every few runs."""
    for seed in seeds:
        by_stages: dict[int, list[str]] = {}
        for name, c in presets.items():
            by_stages.setdefault(c.stages, []).append(name)
        for stages, names in by_stages.items():
            for some in (names[i : i + TOGETHER] for i in range(0, len(names), TOGETHER)):
                configurations = [dataclasses.replace(presets[name], seed=seed) for name in some]
                returned = launch.run(
                    pipeline_rank.train,
                    ranks=stages,
                    deadline_s=240 + RUN_S * len(some),
                    configurations=configurations,
                )
                for name, c, *ranks in zip(some, configurations, *returned, strict=True):
                    run = summary(c, ranks)
                    print(row(name, run), flush=True)
                    yield name, seed, run


def summary(c: Configuration, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the ranks of one run measured, in the order of their stages; bits are those of all boundaries, frames included."""
    sent = [[rank["sent"][point] for rank in ranks] for point in range(len(ranks[0]["sent"]))]
    kinds = ("forward", "backward", "announcements", "other")
    total = {kind: sum(rank[kind] for epoch in sent for rank in epoch) for kind in kinds}
    bits = 8 / (ranks[0]["elements"] * (c.stages - 1))
    last = ranks[-1]
    return {
        "configuration": c,
        **{name: last[name] for name in ("loss", "samples", "validation", "validations", "accuracy", "seconds")},
        "bytes": list(itertools.accumulate(sum(rank[kind] for rank in epoch for kind in kinds) for epoch in sent)),
        **{f"{kind}_bits": total[kind] * bits for kind in ("forward", "backward", "announcements")},
        "changes": [changes(epoch) for epoch in sent],
        "cache_bytes": sum(rank["cache_bytes"] for rank in ranks),
        "boundaries_that_differ": sum(
            a["caches"].get("sent") != b["caches"].get("received") for a, b in itertools.pairwise(ranks)
        ),
    }


def changes(ranks: Sequence[Mapping[str, float]]) -> float | None:
    """|a - m| / |a| over all boundaries, from the means of each; None where nothing travelled as a change."""
    values, sizes = (sum(rank.get(name, 0.0) for rank in ranks) for name in ("mean_value", "mean_change"))
    return sizes / values if values else None


def row(name: str, run: Mapping[str, Any]) -> str:
    """The row of a run."""
    visits = [run["changes"][1], run["changes"][-1]]
    cells = "".join(f"{'-' if ratio is None else f'{ratio:.3f}':>7}" for ratio in visits)
    return (
        f"  {name:<45}{run['configuration'].seed:>4}{run['loss'][-1]:>10.4f}{run['samples']:>10.4f}"
        f"{run['validation']:>12.4f}{run['forward_bits']:>9.3f}{run['backward_bits']:>9.3f}{cells}{run['seconds'][-1]:>9.1f}"
    )


def curve(run: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a run as the JSON has it: a point an epoch or c.point steps, with bytes that all stages together have sent."""
    c, left_out = run["configuration"], ("configuration", "loss", "validations", "seconds", "changes")
    return {key: value for key, value in run.items() if key not in left_out} | {
        "step": [(c.point or c.epoch_steps) * (i + 1) for i in range(len(run["loss"]))],
        **{key: [round(loss, 5) for loss in run[key]] for key in ("loss", "validations")},
        "seconds": [round(seconds, 2) for seconds in run["seconds"]],
        "changes": [None if ratio is None else round(ratio, 5) for ratio in run["changes"]],
    }


PARTS = {
    "claims": CLAIMS,
    "fine_tuning": FINE_TUNING,
    "fresh": FRESH,
    "wide": WIDE,
    "sentences": SENTENCES,
    "variants": VARIANTS,
    "stages": STAGES,
    "two_bits": TWO_BITS,
}
