"""Values of runs that share their seeds: ratios seed by seed, their mean, its standard error, and gates on it."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from report import Gate


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A value over another of the same seed, by seed."""

    by_seed: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over seeds."""
        return statistics.mean(self.by_seed)

    @property
    def error(self) -> float:
        """The standard error of the mean; 0 of one seed, which has none."""
        seeds = len(self.by_seed)
        return statistics.stdev(self.by_seed) / math.sqrt(seeds) if seeds > 1 else 0.0

    def cell(self) -> str:
        """The mean ± its error, or of one seed the ratio alone."""
        return f"{self.mean:.4f} ± {self.error:.4f}" if len(self.by_seed) > 1 else f"{self.mean:.4f}"

    def show(self, name: str) -> Ratio:
        """Prints the line about it below the rows; returns the ratio."""
        about = f"mean {self.mean:.4f}, standard error {self.error:.4f} over seeds"
        spread = ", ".join(f"{ratio:.4f}" for ratio in self.by_seed)
        print(f"# {name}: {about if len(self.by_seed) > 1 else 'of one seed'} ({spread})")
        return self

    def gate(self, name: str, op: str, bound: float) -> Gate:
        """Of the mean; a bound from above is a standard error higher than the claim's."""
        if op in ("<", "<="):
            return Gate(f"{name}, bound {bound:g} + a standard error", self.mean, op, bound + self.error)
        return Gate(name, self.mean, op, bound)


def ratio(of: Callable[[Any], float], runs: Sequence[Any], baseline: Sequence[Any]) -> Ratio:
    """Of a value of two lists of runs, one a seed in order; the baseline may have more seeds."""
    return Ratio(tuple(of(a) / of(b) for a, b in zip(runs, baseline, strict=False)))
