"""Draws the runs of `convergence subspace`: loss by step, and what loss a boundary's bytes buy."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (lines, ends) = pyplot.subplots(1, 2, figsize=(15, 6), dpi=120, layout="constrained")
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for curve in curves:
        by_name.setdefault(curve["name"], []).append(curve)
    for number, name in enumerate(name for name in _LINES if name in by_name):
        first = by_name[name][0]
        lines.plot(first["step"], first["loss"], label=name, linewidth=1.4, color=f"C{number}")
    for name, of_name in by_name.items():
        at = of_name[0]["token_bytes"], statistics.mean(curve["validation"] for curve in of_name)
        ends.plot(*at, "o", markersize=4, color=_COLOURS.get(name.partition(",")[0], "tab:blue"))
        ends.annotate(name, at, fontsize=7, xytext=(4, 4), textcoords="offset points")
    lines.set_xlabel("step")
    lines.set_ylabel("training loss (nats a byte; mean of 20 steps)")
    lines.legend(fontsize=8)
    ends.set_xlabel("bytes a token and boundary, each way")
    ends.set_xscale("log", base=2)
    ends.xaxis.set_major_formatter("{x:g}")
    ends.set_ylabel("validation loss (nats a byte)")
    for axes in (lines, ends):
        axes.grid(alpha=0.3, which="both")
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
