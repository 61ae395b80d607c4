"""The bounds of the runs of `convergence seed_replay`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from report import Gate

Run = Mapping[str, Any]
Runs = Mapping[str, Sequence[Run]]  # by name, a seed each
BITS = {"none": 32, "fp16": 16, "log9": 9, "logbyte": 8, "sign1": 2}  # of a code, n of them packed
# Reported next to the gates, as they are: loss of a run / of another.
REPORTED = (
    ("sign", "float"),
    ("Gaussian", "byte"),
    ("in place", "byte"),
    ("send_full_grad", "byte"),
    ("best η", "DDP, best rate"),
    ("tuned, byte, best η", "tuned, DDP, best rate"),
)


def gates(runs: Runs, serial: Run, *, quick: bool) -> list[Gate]:
    """All of them.

    Args:
        runs: A run a seed, each with `machines`, what every machine returned (rank.train).
        serial: The first seed's `byte` of all machines' gradients in one process.
        quick: Looser bounds on losses, for a quarter of the iterations.
    """
    for name, other in REPORTED:
        if name in runs and other in runs:
            loss_ratio(runs, name, other)
    close = 0.04 if quick else 0.02
    same = 1.1 if quick else 1.01
    return [
        away_gate(runs, "byte", close),
        away_gate(runs, "log9", close),
        ratio_gate(runs, "byte", "DDP", same),
        ratio_gate(runs, "tuned, byte", "tuned, DDP", same),
        Gate("loss of `byte` after / before, largest", learned(runs["byte"]), "<", 0.8 if quick else 0.05),
        Gate("iterations at which one process and 4 machines differ", differing([serial, runs["byte"][0]]), "==", 0),
        Gate("iterations at which machines' parameters differ, all runs", sum(map(unequal, every(runs))), "==", 0),
        Gate("bytes of gradients received - by the formula, all runs", off_formula(runs), "==", 0),
    ]


def loss_ratio(runs: Runs, name: str, other: str) -> tuple[float, float]:
    """Mean over paired seeds of the ratio of the last losses, and its standard error, 0 of a single seed; printed."""
    ratios = [last(a) / last(b) for a, b in zip(runs[name], runs[other], strict=False)]
    mean = statistics.mean(ratios)
    error = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else 0
    each = ", ".join(f"{ratio:.4f}" for ratio in ratios)
    print(f"# loss {name} / {other}: mean {mean:.4f}, standard error {error:.4f}, {each}")
    return mean, error


def away_gate(runs: Runs, name: str, bound: float) -> Gate:
    """Of |loss / float's - 1|; the standard error is added to the bound."""
    mean, error = loss_ratio(runs, name, "float")
    return Gate(f"|loss {name} / float - 1|, bound {bound} + a standard error", abs(mean - 1), "<", bound + error)


def ratio_gate(runs: Runs, name: str, other: str, bound: float) -> Gate:
    """Of that mean; the error is added to the bound."""
    mean, error = loss_ratio(runs, name, other)
    return Gate(f"loss {name} / {other}, bound {bound} + a standard error", mean, "<", bound + error)


def every(runs: Runs) -> list[Run]:
    """All runs of all names and seeds."""
    return [run for of_name in runs.values() for run in of_name]


def last(run: Run) -> float:
    """The loss at the end (of every machine the same, for their parameters are)."""
    return run["machines"][0]["loss"][-1]


def learned(of_name: Sequence[Run]) -> float:
    """The largest ratio of the loss at the end to that at the start."""
    return max(last(run) / run["machines"][0]["loss"][0] for run in of_name)


def unequal(run: Run) -> int:
    """Points of the curve at which machines of one run have different parameters."""
    return sum(len(set(sums)) > 1 for sums in zip(*(m["checksum"] for m in run["machines"]), strict=True))


def differing(two: Sequence[Run]) -> int:
    """Points at which two runs have different parameters."""
    first, second = (run["machines"][0]["checksum"] for run in two)
    return sum(a != b for a, b in zip(first, second, strict=True))


def off_formula(runs: Runs) -> int:
    """Differences of the codes that machines received in bytes from iterations·M·(M-1)·(bytes of n codes), in all."""
    total = 0
    for run in every(runs):
        c = run["configuration"]
        if c.method == "replay":
            codes = math.ceil(c.samples * BITS[c.options.get("codec", "logbyte")] / 8)
            formula = c.iterations * codes * c.machines * (c.machines - 1)
            total += abs(sum(machine["payload"] for machine in run["machines"]) - formula)
    return total
