"""The bounds of the runs of `convergence subspace`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import paired
from report import Gate
from tables import Columns

from convergence import flattery
from convergence.subspace.presets import BY_SECONDS, FREE_BLOCKS

Runs = Mapping[str, Sequence[Mapping[str, Any]]]  # by name, a seed each
EIGHT_BITS = "constrained, 32 in 8 bits"
# A run's loss over another's: (run, other, comparison, bound).
RATIOS = (
    ("constrained, 32", "free", "<", 1.08),
    ("constrained, 32", "top-k, 25 of 256", "<", 1.0),
    ("1 bit of all", "free", ">", 2.0),
    ("constrained, 32", "constrained, 32, normal rows", "<=", 1.01),
    (EIGHT_BITS, "constrained, 32", "<=", 1.005),
    (EIGHT_BITS, "1 bit of all", "<", 1.0),
    (EIGHT_BITS, "constrained, 64 in 4 bits", "<", 1.0),
    ("constrained, 16", "free, width 128", "<", 1.08),
    ("constrained, 16", "constrained, 16, all blocks", "<", 1.0),
)
# Few steps of a small decoder have not parted the losses yet.
OF_QUICK = (("constrained, 32", "free", "<", 1.15), (EIGHT_BITS, "constrained, 32", "<=", 1.02))
LAST = 5  # points of a curve whose mean is a run's training loss
# How a run's loss is taken: while it trained, by its own messages; of its last weights, by exact messages.
LOSSES = ("training", "validation")


def gates(runs: Runs, *, quick: bool) -> list[Gate]:
    """Those whose runs are there, by both losses: means over paired seeds."""
    print_ratios(runs)
    bounds = [bound for bound in (OF_QUICK if quick else RATIOS) if {bound[0], bound[1]} <= runs.keys()]
    return [
        flattery.gate(
            runs, lambda name: "free, 4 stages" if name in BY_SECONDS else "free", lambda run: loss(run, LOSSES[0])
        ),
        *(ratio_gate(runs, how, *bound) for bound in bounds for how in LOSSES),
    ]


def loss(run: Mapping[str, Any], how: str) -> float:
    """Nats a byte."""
    return statistics.mean(run["loss"][-LAST:]) if how == LOSSES[0] else run["validation"]


def ratio(runs: Runs, how: str, name: str, other: str) -> paired.Ratio:
    """Over paired seeds."""
    return paired.ratio(lambda run: loss(run, how), runs[name], runs[other])


def ratio_gate(runs: Runs, how: str, name: str, other: str, op: str, bound: float) -> Gate:
    """Prints the seeds' ratios."""
    found = ratio(runs, how, name, other).show(f"{how}, {name} / {other}")
    return Gate(f"{how}, {name} / {other}", found.mean, op, bound)


def print_ratios(runs: Runs) -> None:
    """Prints a line for each run: its losses over the free decoder's, means over paired seeds."""
    if "free" not in runs:
        return
    columns = Columns("loss / free 31 | training 10.4f | validation 12.4f")
    print(columns.heading())
    for name in runs:
        if name != "free" and name not in {**FREE_BLOCKS, **BY_SECONDS}:  # those are of another width or length
            print("#" + columns.row(name, *(ratio(runs, how, name, "free").mean for how in LOSSES)))
