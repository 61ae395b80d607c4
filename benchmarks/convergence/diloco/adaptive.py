"""Rank and interval that adapt, by either measure, next to fixed ones: loss against bytes, and where r_t and H_t went.

Most runs wait for their averages (mode "sync"), with which a low rank had the least loss in `convergence diloco`.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from report import Gate

from convergence.diloco import gates as diloco_gates
from convergence.diloco import runs as diloco_runs
from convergence.diloco.presets import ADAPTIVE, without
from convergence.diloco.rank import Configuration

Runs = Mapping[str, Sequence[Mapping[str, Any]]]  # by name, a seed each
FIRST_RANK, FIRST_EVERY = 24, 20  # r_1 and H_1
FIXED: dict[str, Any] = without(*ADAPTIVE, "sync_warmup") | {"mode": "sync"}
RANK_ALONE: dict[str, Any] = FIXED | {"adapt_rank": True, "min_rank": 2}
BOTH: dict[str, Any] = RANK_ALONE | {"adapt_sync_every": True, "min_sync_every": 5}
AVERAGE = {"adapt_to": "average"}
DELAYED = {"mode": "continue", "sync_warmup": 3}  # as the paper's method in presets.py


def fixed(rank: int, sync_every: int) -> Configuration:
    """A run of which nothing adapts."""
    return Configuration(outer=FIXED | {"rank": rank, "sync_every": sync_every})


ROWS = {
    "r=24, H=20": fixed(FIRST_RANK, FIRST_EVERY),
    "r=16, H=20": fixed(16, 20),
    "r=8, H=20": fixed(8, 20),
    "r=4, H=20": fixed(4, 20),
    # As many bytes a step as the first.
    "r=16, H=13": fixed(16, 13),
    "r=8, H=7": fixed(8, 7),
    "r, average": Configuration(outer=RANK_ALONE | AVERAGE),
    "r and H, average": Configuration(outer=BOTH | AVERAGE),
    "r and H, 0.95": Configuration(outer=BOTH),
    "r and H, 0.7": Configuration(outer=BOTH | {"energy": 0.7}),
    "r, 0.7": Configuration(outer=RANK_ALONE | {"energy": 0.7}),
    "continue, r=24, H=20": Configuration(outer=FIXED | DELAYED | {"rank": FIRST_RANK, "sync_every": FIRST_EVERY}),
    "continue, r and H, average": Configuration(outer=BOTH | DELAYED | AVERAGE),
    "continue, r and H, 0.95": Configuration(outer=BOTH | DELAYED),
}
QUICK = ("r=24, H=20", "r and H, average", "r and H, 0.95")
BASE = "r=24, H=20"


def measure(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """Runs every row; prints it, and then where each one's rank went.

    Args:
        quick: 80 steps of three rows with intervals of at most 10.
        seeds: Of every run.

    Returns:
        `configurations` and `curves` for the JSON, and the gates.
    """
    diloco_runs.print_heading()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in (QUICK if quick else ROWS)}
    for seed in range(seeds):
        for name, of_name in runs.items():
            run = dataclasses.replace(ROWS[name], seed=seed)
            of_name.append(diloco_runs.run(name, diloco_runs.shortened(run) if quick else run))
    print_ranks(runs)
    return {
        "parameters": diloco_runs.ELEMENTS,
        "configurations": {name: dataclasses.asdict(of_name[0]["configuration"]) for name, of_name in runs.items()},
        "curves": [diloco_runs.curve(entry) for of_name in runs.values() for entry in of_name],
    }, gates(runs, quick=quick)


def print_ranks(runs: Runs) -> None:
    """Means over seeds: loss, megabytes, r_t at the lowest point of the run and at its end, H_t at its end."""
    print(f"# {'mean of seeds':<26}{'loss':>9}{'MB':>10}{'least r_t':>11}{'last r_t':>10}{'last H_t':>10}")
    for name, entries in runs.items():
        loss, sent, least, last, every = (
            statistics.mean(values)
            for values in zip(
                *(
                    (
                        entry["validation"],
                        entry["bytes"][-1] / 1e6,
                        min(outer["rank"] for outer in entry["outer"]),
                        entry["outer"][-1]["rank"],
                        entry["outer"][-1]["sync_every"],
                    )
                    for entry in entries
                ),
                strict=True,
            )
        )
        print(f"# {name:<26}{loss:>9.4f}{sent:>10.3f}{least:>11.1f}{last:>10.1f}{every:>10.1f}")


def gates(runs: Runs, *, quick: bool) -> list[Gate]:
    """The new measure is below the paper's at no more bytes and next to the fixed one; its rank rises again."""
    new, old = runs["r and H, 0.95"], runs["r and H, average"]
    wrong = sum(
        outer["sync_every"] != diloco_gates.interval_of(outer["rank"], entry)
        for entry in (*new, *old)
        for outer in entry["outer"]
    )
    arithmetic = [
        diloco_gates.formula_gate(runs),
        Gate("outer steps in which H_t is not max(H_min, round(H_1 r_t / r_1))", wrong, "==", 0),
    ]
    if quick:
        return arithmetic
    fallen = statistics.mean(entry["outer"][-1]["rank"] / FIRST_RANK for entry in old)
    risen = statistics.mean(
        entry["outer"][-1]["rank"] / min(outer["rank"] for outer in entry["outer"]) for entry in runs["r and H, 0.7"]
    )
    return [
        diloco_gates.loss_gate(runs, "r and H, 0.95", "r and H, average", 0.97),
        diloco_gates.loss_gate(runs, "r and H, 0.95", BASE, 1.01),
        Gate("r and H, average: last r_t / r_1, mean", fallen, "<", 0.5),
        Gate("r and H, 0.7: last r_t / least r_t, mean", risen, ">", 1.5),
        *arithmetic,
    ]
