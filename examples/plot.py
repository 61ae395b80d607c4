"""Draws training loss against the bytes a rank sent."""

from __future__ import annotations

import dataclasses
from pathlib import Path

MOST_TIMES = 10  # more bytes in one curve than in another: beyond it a linear axis shows only the longest


@dataclasses.dataclass
class Curve:
    """One run, a point a step: the loss (mean over ranks) and what a rank had sent by then, frames included."""

    label: str
    loss: list[float] = dataclasses.field(default_factory=list)
    sent_bytes: list[int] = dataclasses.field(default_factory=list)


def loss_against_bytes(curves: list[Curve], path: Path, *, title: str) -> None:
    """Writes a PNG with a line a curve (mean of the last 10 steps) over its raw losses, drawn faintly."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 4.4), dpi=140, layout="constrained")
    for curve in curves:
        sent_mb = [sent / 1e6 for sent in curve.sent_bytes]
        recent = [curve.loss[max(0, i - 9) : i + 1] for i in range(len(curve.loss))]
        (line,) = axes.plot(sent_mb, [sum(r) / len(r) for r in recent], label=curve.label, linewidth=1.8)
        axes.plot(sent_mb, curve.loss, color=line.get_color(), alpha=0.25, linewidth=0.7)
    axes.set_title(title)
    axes.set_xlabel("sent by a rank (MB)")
    axes.set_ylabel("training loss (nats a byte)")
    totals = [curve.sent_bytes[-1] for curve in curves]
    if max(totals) > MOST_TIMES * min(totals):
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
