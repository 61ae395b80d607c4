"""Perplexities of runs that share their seeds: ratios seed by seed, their mean and its standard error."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A perplexity over another of the same seed, by seed."""

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

    def said(self) -> str:
        """Returns the line about it below the rows."""
        about = f"mean {self.mean:.4f}, standard error {self.error:.4f} over seeds"
        spread = ", ".join(f"{ratio:.4f}" for ratio in self.by_seed)
        return f"{about if len(self.by_seed) > 1 else 'of one seed'} ({spread})"


def ratio(runs: Sequence[dict[str, Any]], baseline: Sequence[dict[str, Any]]) -> Ratio:
    """Of two lists of runs, one a seed in order; the baseline may have more seeds."""
    pairs = zip(runs, baseline, strict=False)
    return Ratio(tuple(a["ranks"][0]["perplexity"] / b["ranks"][0]["perplexity"] for a, b in pairs))


def perplexity(runs: Sequence[dict[str, Any]]) -> float:
    """The mean over seeds."""
    return statistics.mean(run["ranks"][0]["perplexity"] for run in runs)
