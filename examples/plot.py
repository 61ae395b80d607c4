"""Draws training loss against the bytes a rank sent, and against seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib  # here, so that a program without it ends before it trains

MOST_TIMES = 5  # more bytes in one curve than in another: beyond it a linear axis shows only the longest


@dataclasses.dataclass
class Curve:
    """One run, a point a step: the loss (mean over ranks) and what a rank had sent by then, frames included."""

    label: str
    loss: list[float] = dataclasses.field(default_factory=list)
    sent_bytes: list[int] = dataclasses.field(default_factory=list)


def loss_against_bytes(
    curves: list[Curve], path: Path, *, title: str, unit: str = "nats a byte", recent: int = 10
) -> None:
    """Writes a PNG with a line a curve (mean of the last `recent` steps) over its raw losses, drawn faintly."""
    with _figure(path, title, panels=1) as (axes,):
        sent = [[sent / 1e6 for sent in curve.sent_bytes] for curve in curves]
        _draw(axes, curves, sent, "sent by a rank (MB)", recent)
        axes.set_ylabel(f"training loss ({unit})")


def loss_against_bytes_and_seconds(curves: list[Curve], seconds: list[list[float]], path: Path, *, title: str) -> None:
    """The same next to the loss against seconds, a list of them a curve."""
    with _figure(path, title, panels=2) as (by_bytes, by_seconds):
        _draw(by_bytes, curves, [[sent / 1e6 for sent in curve.sent_bytes] for curve in curves], "sent by a rank (MB)")
        _draw(by_seconds, curves, seconds, "seconds")


@contextmanager
def _figure(path: Path, title: str, *, panels: int) -> Iterator[Any]:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, panels, figsize=(7.2 if panels == 1 else 11, 4.4), dpi=140, layout="constrained", squeeze=False
    )
    yield axes[0]
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def _draw(axes: Any, curves: list[Curve], places: list[list[float]], label: str, recent: int = 10) -> None:
    for curve, x in zip(curves, places, strict=True):
        lasts = [curve.loss[max(0, i + 1 - recent) : i + 1] for i in range(len(curve.loss))]
        (line,) = axes.plot(x, [sum(last) / len(last) for last in lasts], label=curve.label, linewidth=1.8)
        axes.plot(x, curve.loss, color=line.get_color(), alpha=0.25, linewidth=0.7)
    axes.set_xlabel(label)
    axes.set_ylabel("training loss (nats a byte)")
    totals = [x[-1] for x in places]
    if max(totals) > MOST_TIMES * min(totals):
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend()
