"""Draws the runs of `convergence aq`: loss by epoch and against bits, and the size of changes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from convergence.panels import banded, by_name, named_points, panels

_LINES = (
    "exact",
    "DirectQ gauss4/gauss4",
    "DirectQ gauss2/gauss4",
    "AQ gauss2/gauss4",
    "AQ gauss4/gauss4",
    "AQ gauss1/gauss4",
    "AQ gauss2/gauss4, m in 2 bits",
)
_TEXT = ", fine-tuning, 4 stages"  # whose runs are drawn where they are there


def draw(curves: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Writes a PNG of three panels, means over seeds: both losses by step; validation against bits; |a - m| / |a| by step.

    Args:
        curves: Of the JSON.
        path: Of the PNG.
        title: Above all of it.
    """
    runs = by_name(curves)
    chosen = {name.removesuffix(_TEXT): of_seeds for name, of_seeds in runs.items() if name.endswith(_TEXT)}
    chosen = chosen or {name: of_seeds for name, of_seeds in runs.items() if name in _LINES} or runs
    points: dict[str, tuple[float, float]] = {}
    with panels(path, 3, size=(17, 5), title=title) as (lines, ends, changes):
        for number, (name, of_seeds) in enumerate(chosen.items()):
            style, first = {"color": f"C{number}"}, of_seeds[0]
            banded(lines, first["step"], [curve["validations"] for curve in of_seeds], **style, label=name)
            banded(lines, first["step"], [curve["loss"] for curve in of_seeds], **style, linestyle=":")
            kept = [i for i, ratio in enumerate(first["changes"]) if ratio]
            if kept:
                ratios = [[curve["changes"][i] for i in kept] for curve in of_seeds]
                banded(changes, [first["step"][i] for i in kept], ratios, **style)
            points[name] = (
                first["forward_bits"] + first["backward_bits"],
                statistics.mean(curve["validation"] for curve in of_seeds),
            )
            ends.plot(*points[name], "o", markersize=4, **style)
        lines.set_xlabel("steps")
        lines.set_ylabel("nats a byte: validation by exact messages; dotted: training")
        ends.set_xlabel("bits an element, forward and backward together")
        ends.set_xscale("log", base=2)
        ends.set_xlim(4, 130)
        ends.xaxis.set_major_formatter("{x:g}")
        ends.set_ylabel("validation by exact messages after training (nats a byte)")
        changes.set_xlabel("steps")
        changes.set_ylabel("|a - m| / |a|")
        changes.set_ylim(bottom=0)
        changes.axhline(0.3, color="tab:gray", linewidth=0.8)
        lines.legend(fontsize=8)
        for axes in (lines, ends, changes):
            axes.grid(alpha=0.3, which="both")
        named_points(ends, points)
