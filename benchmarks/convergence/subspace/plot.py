"""Draws the runs of `convergence subspace`: loss by step, and what loss a boundary's bytes buy."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from convergence.panels import banded, by_name, named_points, panels

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
    """Writes a PNG of two panels: training loss by step; validation loss against bytes a token, means over seeds.

    Args:
        curves: Of the JSON.
        path: Of the PNG.
        title: Above all of it.
    """
    with panels(path, 2, size=(15, 6), title=title) as (lines, ends):
        runs = by_name(curves)
        for name in (name for name in _LINES if name in runs):
            banded(lines, runs[name][0]["step"], [curve["loss"] for curve in runs[name]], label=name)
        points = {
            name: (of_name[0]["token_bytes"], statistics.mean(curve["validation"] for curve in of_name))
            for name, of_name in runs.items()
        }
        worst = 1.2 * min(y for _, y in points.values())  # others would leave the rest a line
        for name, (x, y) in points.items():
            ends.plot(x, min(y, worst), "o" if y < worst else "^", markersize=4, color=_colour(name))
        lines.set_xlabel("step")
        lines.set_ylabel("training loss (nats a byte; mean of 20 steps)")
        lines.legend(fontsize=8)
        ends.set_xlabel("bytes a token and boundary, each way")
        ends.set_xscale("log", base=2)
        ends.xaxis.set_major_formatter("{x:g}")
        ends.set_ylabel("validation loss (nats a byte; means over seeds; triangles lie higher)")
        for axes in (lines, ends):
            axes.grid(alpha=0.3, which="both")
        named_points(
            ends, {name if y < worst else f"{name}: {y:.2f}": (x, min(y, worst)) for name, (x, y) in points.items()}
        )


def _colour(name: str) -> str:
    return _COLOURS.get(name.partition(",")[0], "tab:blue")
