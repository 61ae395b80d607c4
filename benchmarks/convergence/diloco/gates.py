"""The bounds of the runs of `convergence diloco`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from report import Gate

Runs = Mapping[str, Sequence[Mapping[str, Any]]]  # by name, a seed each
# Loss / the other's, over paired seeds: (run, other, bound); a standard error is added to the bound.
RATIOS = (
    ("DiLoCo, int4 EF", "DiLoCo", 1.01),
    ("DiLoCo, gauss2", "DiLoCo", 1.01),
    ("H=5 continue", "H=5 sync", 1.06),
    ("DiLoCoX", "OpenDiLoCo", 1.0),
    ("DiLoCoX", "CocktailSGD", 1.0),
)
REPORTED = (("DiLoCoX", "OpenDiLoCo, one more"),)  # as those, without a bound
PAIRED = {name for run, other, *_ in (*RATIOS, *REPORTED) for name in (run, other)}


def gates(runs: Runs, *, quick: bool) -> list[Gate]:
    """All of them; `quick`: contrasts that 80 steps show in place of those of loss."""
    if quick:
        compared = quick_gates(runs)
    else:
        for pair in REPORTED:
            loss_ratio(runs, *pair)
        compared = [*(loss_gate(runs, *pair) for pair in RATIOS), three_gate(runs)]
    return [*compared, formula_gate(runs), *adaptation_gates(runs["DiLoCoX"])]


def loss_ratio(runs: Runs, name: str, other: str) -> tuple[float, float]:
    """Mean over paired seeds of the ratio of losses, and its standard error, 0 of a single seed; printed."""
    ratios = [a["validation"] / b["validation"] for a, b in zip(runs[name], runs[other], strict=True)]
    mean = statistics.mean(ratios)
    error = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else 0
    print(
        f"# loss {name} / {other}: mean {mean:.4f}, standard error {error:.4f}, {', '.join(f'{r:.4f}' for r in ratios)}"
    )
    return mean, error


def loss_gate(runs: Runs, name: str, other: str, bound: float) -> Gate:
    """Of that mean; the error is added to the bound."""
    mean, error = loss_ratio(runs, name, other)
    return Gate(f"loss {name} / {other}, bound {bound} + a standard error", mean, "<", bound + error)


def three_gate(runs: Runs) -> Gate:
    """Of one seed."""
    ratio = runs["DiLoCoX, D=3"][0]["validation"] / runs["DiLoCoX"][0]["validation"]
    return Gate("loss DiLoCoX of 3 ranks / of 2", ratio, "<", 1.02)


def quick_gates(runs: Runs) -> list[Gate]:
    """Contrasts that 80 steps show."""
    first = {name: entries[0] for name, entries in runs.items()}
    int4 = first["DiLoCo, int4 EF"]["validation"] / first["DiLoCo"]["validation"]
    worst = max(entry["validation"] for entry in first.values())
    ratios = [first[name]["ratio"] for name in ("DiLoCoX", "DiLoCo, int4 EF", "DiLoCo")]
    return [
        Gate("loss DiLoCo, int4 EF / DiLoCo, loose", int4, "<", 1.03),
        Gate("largest loss (of a model that has learned nothing: 4.85)", worst, "<", 3.2),
        Gate("bytes, DiLoCo / with int4 EF", ratios[1] / ratios[2], ">", 7.0),
        Gate("bytes, with int4 EF / DiLoCoX", ratios[0] / ratios[1], ">", 3.0),
    ]


def formula_gate(runs: Runs) -> Gate:
    """How far the bytes of any run are from the formula's."""
    off = [abs(entry["bytes"][-1] / entry["formula"] - 1) for entries in runs.values() for entry in entries]
    return Gate("bytes sent / by the formula - 1, largest of all runs", max(off), "<", 0.01)


def adaptation_gates(entries: Sequence[Mapping[str, Any]]) -> list[Gate]:
    """r_t has fallen, and H_t is what r_t says, over all seeds."""
    last = [entry["outer"][-1]["rank"] / entry["outer"][0]["rank"] for entry in entries]
    wrong = sum(
        outer["sync_every"] != interval_of(outer["rank"], entry) for entry in entries for outer in entry["outer"]
    )
    return [
        Gate("DiLoCoX: last r_t / r_1, mean", statistics.mean(last), "<", 1.0),
        Gate("DiLoCoX: outer steps in which H_t is not max(H_1 / 4, round(H_1 r_t / r_1))", wrong, "==", 0),
    ]


def interval_of(rank: float, entry: Mapping[str, Any]) -> int:
    """H_t of that r_t."""
    outer = entry["configuration"].outer
    return max(outer["sync_every"] // 4, math.floor(outer["sync_every"] * rank / outer["rank"] + 0.5))
