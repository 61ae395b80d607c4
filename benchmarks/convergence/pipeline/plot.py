"""Draws the runs of `convergence aq`: loss by epoch and against bytes, |a - m| / |a|, and the gap by stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_LINES = (
    "exact",
    "DirectQ sym2/sym8",
    "DirectQ gauss2/gauss4",
    "AQ sym2/sym8",
    "AQ gauss2/gauss4",
    "AQ gauss1/gauss4",
)


def draw(curves: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Writes a PNG of three panels, of seed 0: training loss by epoch; loss of every run against bytes; |a - m| / |a|.

    Args:
        curves: Of the JSON.
        path: Of the PNG.
        title: Above all of it.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first = {curve["name"]: curve for curve in curves if curve["seed"] == 0}
    figure, (lines, ends, changes) = pyplot.subplots(1, 3, figsize=(17, 5), dpi=120, layout="constrained")
    for name in (name for name in _LINES if name in first):
        curve = first[name]
        style = {"label": name, "linewidth": 1.4, "linestyle": "--" if name == "exact" else "-"}
        lines.plot(curve["step"], curve["loss"], **style)
        points = [(epoch, ratio) for epoch, ratio in zip(curve["step"], curve["changes"], strict=True) if ratio]
        if points:
            changes.plot(*zip(*points, strict=True), label=name, linewidth=1.4)
    noise = first.get("AQ gauss2/gauss4, noise")
    if noise:
        points = [(e, ratio) for e, ratio in zip(noise["step"], noise["changes"], strict=True) if ratio]
        changes.plot(*zip(*points, strict=True), label=noise["name"], linewidth=1.4, linestyle=":")
    for name, curve in first.items():
        at = curve["bytes"][-1] / 1e6, curve["samples"]
        ends.plot(*at, "o", markersize=4, color="tab:red" if name.startswith("AQ") else "tab:blue")
        ends.annotate(name, at, fontsize=6, xytext=(3, 3), textcoords="offset points")
    lines.set_xlabel("epoch")
    lines.set_ylabel("training loss (nats a byte; mean of an epoch)")
    ends.set_xlabel("sent by all stages (MB)")
    ends.set_xscale("log")
    ends.set_ylabel("exact loss of the samples after training (nats a byte)")
    changes.set_xlabel("epoch")
    changes.set_ylabel("|a - m| / |a|")
    changes.axhline(0.3, color="tab:gray", linewidth=0.8)
    for axes in (lines, changes):
        axes.set_ylim(bottom=0 if axes is changes else None)
        axes.legend(fontsize=8)
    for axes in (lines, ends, changes):
        axes.grid(alpha=0.3, which="both")
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
