"""Draws the runs of `convergence diloco`: loss against bytes, which span three orders of magnitude, and r_t and H_t."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from convergence.panels import banded, by_name, named_points, panels

_LINES = (
    "all_reduce",
    "DiLoCo",
    "DiLoCo, int4 EF",
    "DiLoCo, gauss2",
    "H=5 continue",
    "SparseLoCo",
    "DiLoCoX",
    "OpenDiLoCo",
    "CocktailSGD",
)
_RECENT = 4  # points of a curve, of 5 steps each, that one of a line is the mean of


def draw(curves: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Writes a PNG of three panels: training loss against bytes; mean validation loss of every run; r_t and H_t of seed 0.

    Args:
        curves: Of the JSON.
        path: Of the PNG.
        title: Above all of it.
    """
    runs = by_name(curves)
    with panels(path, 3, size=(17, 5), title=title) as (lines, ends, adaptation):
        for name in (name for name in _LINES if name in runs):
            sent = [total / 1e6 for total in runs[name][0]["bytes"] if total]
            losses = [curve["loss"][-len(sent) :] for curve in runs[name]]
            banded(lines, sent, losses, recent=_RECENT, label=name)
        lines.set_ylabel("training loss (nats a byte; mean of 20 steps)")
        lines.legend(fontsize=8)
        lines.set_xscale("log")
        lines.set_xlabel("sent by a rank (MB)")
        lines.grid(alpha=0.3, which="both")
        draw_adaptation(adaptation, runs["DiLoCoX"][0]["outer"])
        draw_ends(ends, runs, {"DiLoCoX"})


def draw_ends(axes: Any, runs: Mapping[str, Sequence[Mapping[str, Any]]], marked: Set[str]) -> None:
    """A point a run with its name: mean validation loss against bytes; those `marked` in red."""
    points = {
        name: (of_seeds[0]["bytes"][-1] / 1e6, statistics.mean(curve["validation"] for curve in of_seeds))
        for name, of_seeds in runs.items()
    }
    for name, at in points.items():
        axes.plot(*at, "o", markersize=4, color="tab:red" if name in marked else "tab:blue")
    axes.set_ylabel("validation loss of the outer parameters")
    axes.set_xscale("log")
    axes.set_xlabel("sent by a rank (MB)")
    axes.grid(alpha=0.3, which="both")
    named_points(axes, points)


def draw_adaptation(axes: Any, outer: Sequence[Mapping[str, float]]) -> None:
    """r_t, what it is a mean of, and H_t on a second axis, against inner steps."""
    steps = [step["step"] for step in outer]
    arrived = [(step["step"], step["effective_rank"]) for step in outer if step["effective_rank"]]
    handles = [
        *axes.plot(*zip(*arrived, strict=True), ".", color="tab:gray", label="effective rank of an average"),
        *axes.plot(steps, [step["rank"] for step in outer], color="tab:blue", label="r_t", drawstyle="steps-post"),
    ]
    axes.set_xlabel("inner steps")
    axes.set_ylabel("rank")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    intervals = axes.twinx()
    handles += intervals.plot(
        steps, [step["sync_every"] for step in outer], color="tab:orange", label="H_t", drawstyle="steps-post"
    )
    intervals.set_ylabel("inner steps from one outer step to the next")
    intervals.set_ylim(bottom=0)
    axes.legend(handles=handles, fontsize=8)
