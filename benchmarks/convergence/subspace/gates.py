"""The bounds of the runs of `convergence subspace`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from report import Gate

Runs = Mapping[str, Sequence[Mapping[str, Any]]]  # by name, a seed each
EIGHT_BITS = "constrained, 32 in 8 bits"
# A run's validation loss over another's: (run, other, comparison, bound).
RATIOS = (
    ("constrained, 32", "free", "<", 1.08),
    ("constrained, 32", "top-k, 25 of 256", "<", 1.0),
    ("1 bit of all", "free", ">", 2.0),
    ("constrained, 32", "constrained, 32, normal rows", "<=", 1.01),
    (EIGHT_BITS, "constrained, 32", "<=", 1.005),
    (EIGHT_BITS, "1 bit of all", "<", 1.0),
    (EIGHT_BITS, "constrained, 64 in 4 bits", "<", 1.0),
)
# Few steps of a small decoder have not parted the losses yet.
OF_QUICK = (("constrained, 32", "free", "<", 1.15), (EIGHT_BITS, "constrained, 32", "<=", 1.02))


def gates(runs: Runs, *, quick: bool) -> list[Gate]:
    """Those whose runs are there: means over paired seeds."""
    print_ratios(runs)
    return [
        ratio_gate(runs, *bound) for bound in (OF_QUICK if quick else RATIOS) if {bound[0], bound[1]} <= runs.keys()
    ]


def ratios(runs: Runs, name: str, other: str) -> list[float]:
    """By seed."""
    return [a["validation"] / b["validation"] for a, b in zip(runs[name], runs[other], strict=False)]


def ratio_gate(runs: Runs, name: str, other: str, op: str, bound: float) -> Gate:
    """Prints the seeds' ratios."""
    by_seed = ratios(runs, name, other)
    print(f"# validation, {name} / {other}: {', '.join(f'{ratio:.4f}' for ratio in by_seed)}")
    return Gate(f"validation, {name} / {other}", statistics.mean(by_seed), op, bound)


def print_ratios(runs: Runs) -> None:
    """Prints a line for each run: its loss over the free decoder's, means over paired seeds."""
    if "free" not in runs:
        return
    print(f"# {'validation / free':<31}{'':>10}")
    for name in runs:
        if name != "free":
            print(f"#   {name:<29}{statistics.mean(ratios(runs, name, 'free')):>10.4f}")
