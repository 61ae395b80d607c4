"""Draws the runs of `convergence subspace`: loss by step, and what loss a boundary's bytes buy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from convergence.panels import panels

_LINES = (
    "free",
    "constrained, 32",
    "constrained, 32 in 8 bits",
    "projection, 32",
    "4 bits of all",
    "top-k, 25 of 256",
    "2 bits of all",
    "1 bit of all",
)
_COLOURS = {"free": "black", "constrained": "tab:red", "projection": "tab:green", "bottleneck": "tab:olive"}


def draw(curves: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Writes a PNG of two panels: training loss by step of seed 0; validation loss against bytes a token, means over seeds.

    Args:
        curves: Of the JSON.
        path: Of the PNG.
        title: Above all of it.
    """
    with panels(path, 2, size=(15, 6), title=title) as (lines, ends):
        by_name: dict[str, list[Mapping[str, Any]]] = {}
        for curve in curves:
            by_name.setdefault(curve["name"], []).append(curve)
        for number, name in enumerate(name for name in _LINES if name in by_name):
            first = by_name[name][0]
            lines.plot(first["step"], first["loss"], label=name, linewidth=1.4, color=f"C{number}")
        points = {
            name: (of_name[0]["token_bytes"], statistics.mean(curve["validation"] for curve in of_name))
            for name, of_name in by_name.items()
        }
        worst = 1.2 * min(y for _, y in points.values())  # others would leave the rest a line
        for name, (x, y) in points.items():
            ends.plot(x, min(y, worst), "o" if y < worst else "^", markersize=4, color=_colour(name))
        for name, (x, y), height in spread(points, worst):
            label = name if y < worst else f"{name}: {y:.2f}"
            arrow = {"arrowstyle": "-", "linewidth": 0.5, "color": "tab:gray"}
            ends.annotate(
                label, (x, min(y, worst)), xytext=(1.1 * x, height), fontsize=7, va="center", arrowprops=arrow
            )
        lines.set_xlabel("step")
        lines.set_ylabel("training loss (nats a byte; mean of 20 steps)")
        lines.legend(fontsize=8)
        ends.set_xlabel("bytes a token and boundary, each way")
        ends.set_xscale("log", base=2)
        ends.xaxis.set_major_formatter("{x:g}")
        ends.set_xlim(right=2048)
        ends.set_ylabel("validation loss (nats a byte; means over seeds; triangles lie higher)")
        for axes in (lines, ends):
            axes.grid(alpha=0.3, which="both")


def _colour(name: str) -> str:
    return _COLOURS.get(name.partition(",")[0], "tab:blue")


def spread(points: Mapping[str, tuple[float, float]], top: float) -> list[tuple[str, tuple[float, float], float]]:
    """(name, point, height of its label): labels of points that have about as many bytes stand a line apart.

    Args:
        points: By name, (bytes, loss).
        top: The highest that a point is drawn.
    """
    line, found = top / 130, []
    columns: dict[int, list[str]] = {}
    for name, (x, _) in points.items():
        columns.setdefault(round(math.log2(x)), []).append(name)
    for names in columns.values():
        height = 0.0
        for name in sorted(names, key=lambda name: points[name][1]):
            height = max(height + line, min(points[name][1], top))
            found.append((name, points[name], height))
    return found
