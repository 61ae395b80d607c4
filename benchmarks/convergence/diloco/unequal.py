"""Two sites of which one is half as fast: intervals by a count of steps, and by the clock.

A site's speed is given: an inner step takes at least so long, several times what it computes, so that the seconds here are
those of the method and not of the machine.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import launch
from report import Gate

from convergence.diloco.unequal_rank import Sites, train
from convergence.panels import panels
from torch_lowcomm.diloco import presets
from torch_lowcomm.diloco.presets import TWO_BITS

Runs = Mapping[str, Sequence[Mapping[str, Any]]]  # by name, a seed each
PACE_S, SLOW = 0.08, 2.0  # of an inner step at the fast site; times as long at the slow one
EVERY, OUTER_STEPS = 40, 20
EQUAL, SAMPLES, SAME, HALF, FEWER, CLOCK = (
    "equal sites, sync_every=40",
    "equal sites, sync_every=30",
    "one half as fast, sync_every=40",
    "the same, half the steps",
    "one half as fast, sync_every=20",
    "one half as fast, sync_seconds",
)


def rows(*, quick: bool) -> dict[str, Sites]:
    """The runs by name."""
    every, outer_steps = (8, 4) if quick else (EVERY, OUTER_STEPS)
    options = presets.diloco(sync_every=every) | {"codec": TWO_BITS}
    # At most twice the steps that fit into the interval: a limit, which is not reached.
    by_clock = options | {"sync_every": 2 * every, "sync_seconds": every * PACE_S}
    equal, unequal = (PACE_S, PACE_S), (PACE_S, SLOW * PACE_S)
    found = {
        EQUAL: Sites(options, equal, outer_steps),
        # As many samples as by the clock: those of a fast and of a slow site.
        SAMPLES: Sites(options | {"sync_every": every * 3 // 4}, equal, outer_steps),
        SAME: Sites(options, unequal, outer_steps),
        HALF: Sites(options, unequal, outer_steps // 2),
        FEWER: Sites(options | {"sync_every": every // 2}, unequal, outer_steps),
        CLOCK: Sites(by_clock, unequal, outer_steps),
    }
    return {name: found[name] for name in (EQUAL, CLOCK)} if quick else found


def measure(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """Runs every row; prints it.

    Args:
        quick: Two rows with intervals of 8 steps, and bounds that a busy machine keeps.
        seeds: Of every run.

    Returns:
        `configurations` and `curves` for the JSON, and the gates.
    """
    print(f"# {'run':<34}{'seed':>5}{'loss':>9}{'outer':>7}{'fast':>7}{'slow':>7}{'MB':>8}{'seconds':>9}")
    known = rows(quick=quick)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in known}
    for seed in range(seeds):
        for name, sites in known.items():
            runs[name].append(_run(name, dataclasses.replace(sites, seed=seed)))
    return {
        "configurations": {name: dataclasses.asdict(sites) for name, sites in known.items()},
        "curves": [entry for of_name in runs.values() for entry in of_name],
    }, gates(runs, quick=quick)


def _run(name: str, sites: Sites) -> dict[str, Any]:
    deadline_s = 120 + 5 * sites.outer_steps * sites.outer["sync_every"] * max(sites.pace_s)
    fast, slow = launch.run(train, ranks=len(sites.pace_s), deadline_s=deadline_s, configuration=sites)
    entry = {"name": name, "seed": sites.seed, **fast, "slow_step": slow["step"]}
    print(
        f"  {name:<34}{sites.seed:>5}{entry['validation']:>9.4f}{len(fast['step']):>7}{fast['step'][-1]:>7}"
        f"{slow['step'][-1]:>7}{fast['bytes'][-1] / 1e6:>8.3f}{fast['seconds'][-1]:>9.2f}",
        flush=True,
    )
    return entry


def _mean(of: Sequence[float]) -> tuple[float, float]:
    error = statistics.stdev(of) / math.sqrt(len(of)) if len(of) > 1 else 0.0
    return statistics.mean(of), error


def gates(runs: Runs, *, quick: bool) -> list[Gate]:
    """By the clock the slow site costs no time, and half of its samples; at equal seconds the loss is below that by counts.

    At equal samples it is that of equal sites; that of equal sites in equal seconds, which have a third more, is printed.
    """
    clock, equal = runs[CLOCK], runs[EQUAL]
    slow = statistics.mean(entry["slow_step"][-1] / entry["step"][-1] for entry in clock)
    seconds = statistics.mean(a["seconds"][-1] / b["seconds"][-1] for a, b in zip(clock, equal, strict=True))
    found = [Gate("by the clock: inner steps, slow site / fast site", slow, "<", 0.8 if quick else 0.55)]
    if quick:
        return [*found, Gate("by the clock: seconds / of equal sites, loose", seconds, "<", 1.5)]
    late = statistics.mean(a["seconds"][-1] / b["seconds"][-1] for a, b in zip(runs[SAME], equal, strict=True))
    found += [
        Gate("by the clock: seconds / of equal sites", seconds, "<", 1.05),
        Gate("by a count: seconds / of equal sites", late, ">", 1.9),
    ]
    for other, bound in ((EQUAL, None), (SAMPLES, 1.02), (HALF, 1.0), (FEWER, 1.0)):
        mean, error = _mean([a["validation"] / b["validation"] for a, b in zip(clock, runs[other], strict=True)])
        print(f"# loss by the clock / {other}: mean {mean:.4f}, standard error {error:.4f}")
        if bound is None:
            continue
        name = f"loss by the clock / {other}, bound {bound} + a standard error"
        found.append(Gate(name, mean, "<", bound + error))
    return found


def draw(curves: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Writes a PNG of two panels, of seed 0: the fast site's training loss against seconds, and every run's validation loss.

    Args:
        curves: Of the JSON.
        path: Of the PNG.
        title: Above all of it.
    """
    with panels(path, 2, size=(12, 5), title=title) as (lines, ends):
        for curve in (curve for curve in curves if curve["seed"] == 0):
            lines.plot(curve["seconds"], curve["loss"], "o-", markersize=3, label=curve["name"])
            ends.plot(curve["seconds"][-1], curve["validation"], "o", label=curve["name"])
        lines.set_ylabel("training loss of the fast site (nats a byte; mean of an interval)")
        ends.set_ylabel("validation loss of the outer parameters")
        for axes in (lines, ends):
            axes.set_xlabel("seconds")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
