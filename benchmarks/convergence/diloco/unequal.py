"""Two sites of which one is half as fast: intervals by a count of steps, and by the clock.

A site's speed is given: an inner step takes at least so long, several times what it computes, so that the seconds here are
those of the method and not of the machine.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import launch
import paired
from report import Gate
from tables import Columns

from convergence.diloco.unequal_rank import Sites, train
from torch_lowcomm.diloco import presets
from torch_lowcomm.diloco.presets import TWO_BITS

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
COLUMNS = Columns("run 34 | seed 5 | loss 9.4f | outer 7 | fast 7 | slow 7 | MB 8.3f | seconds 9.2f")


def rows(*, quick: bool) -> dict[str, Sites]:
    """The runs by name."""
    every, outer_steps = (8, 3) if quick else (EVERY, OUTER_STEPS)
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
    """Runs every row; prints it. `quick`: two rows with intervals of 8 steps, and bounds that a busy machine keeps."""
    print(COLUMNS.heading())
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
    steps = len(fast["step"]), fast["step"][-1], slow["step"][-1]
    print(
        COLUMNS.row(name, sites.seed, entry["validation"], *steps, fast["bytes"][-1] / 1e6, fast["seconds"][-1]),
        flush=True,
    )
    return entry


def gates(runs: Mapping[str, Sequence[Mapping[str, Any]]], *, quick: bool) -> list[Gate]:
    """By the clock the slow site costs no time, and half of its samples; at equal seconds the loss is below that by counts.

    At equal samples it is that of equal sites; that of equal sites in equal seconds, which have a third more, is printed.
    """
    clock, equal = runs[CLOCK], runs[EQUAL]
    slow = statistics.mean(entry["slow_step"][-1] / entry["step"][-1] for entry in clock)
    seconds = paired.ratio(lambda entry: entry["seconds"][-1], clock, equal).mean
    found = [Gate("by the clock: inner steps, slow site / fast site", slow, "<", 0.8 if quick else 0.55)]
    if quick:
        return [*found, Gate("by the clock: seconds / of equal sites, loose", seconds, "<", 1.5)]
    late = paired.ratio(lambda entry: entry["seconds"][-1], runs[SAME], equal).mean
    found += [
        Gate("by the clock: seconds / of equal sites", seconds, "<", 1.05),
        Gate("by a count: seconds / of equal sites", late, ">", 1.9),
    ]
    for other, bound in ((EQUAL, None), (SAMPLES, 1.02), (HALF, 1.0), (FEWER, 1.0)):
        name = f"loss by the clock / {other}"
        ratio = paired.ratio(lambda entry: entry["validation"], clock, runs[other]).show(name)
        if bound is not None:
            found.append(ratio.gate(name, "<", bound))
    return found
