"""The result of a training run, and the table that compares two."""

from __future__ import annotations

import dataclasses
import math

import plot


@dataclasses.dataclass
class Result(plot.Curve):
    """The result of one run: its curve and the columns of the final table."""

    first_step: int = 0
    perplexity: float = math.nan
    weights_bytes: int = 0
    gradients_bytes: int = 0
    seconds: float = 0.0


def table(results: list[Result]) -> str:
    """The final table: a column a run and, where there are two, quantized against exact."""
    rows = {
        "steps": [f"{r.first_step}+{len(r.loss)}" if r.first_step else f"{len(r.loss)}" for r in results],
        "train loss, mean of the last 20 steps": [f"{sum(r.loss[-20:]) / len(r.loss[-20:]):.4f}" for r in results],
        "validation perplexity": [f"{r.perplexity:.3f}" for r in results],
        "weights sent by a rank, MB": [f"{r.weights_bytes / 1e6:.1f}" for r in results],
        "gradients sent by a rank, MB": [f"{r.gradients_bytes / 1e6:.1f}" for r in results],
        "seconds": [f"{r.seconds:.1f}" for r in results],
    }
    if len(results) == 2:
        exact, quantized = results
        rows["validation perplexity"].append(f"ratio {quantized.perplexity / exact.perplexity:.4f}")
        for name, field in (("weights", "weights_bytes"), ("gradients", "gradients_bytes")):
            if getattr(quantized, field):  # a single rank sends nothing
                times = getattr(exact, field) / getattr(quantized, field)
                rows[f"{name} sent by a rank, MB"].append(f"{times:.2f}× fewer")
    head = ["exact" if r.label == "exact" else "quantized" for r in results]
    lines = {"": head} | rows
    return "\n".join(f"{name:<38}" + "".join(f"{cell:>15}" for cell in cells) for name, cells in lines.items())
