"""Draws the runs of `convergence aq`: loss by epoch and against bits, and the size of changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from convergence.panels import panels

_LINES = (
    "exact",
    "DirectQ sym2/sym8",
    "DirectQ gauss2/gauss4",
    "AQ sym2/sym8",
    "AQ gauss2/gauss4",
    "AQ gauss1/gauss4",
    "AQ gauss2/gauss4, m in 2 bits",
    "AQ gauss2/gauss4, noise",
)
_OTHER_TASKS = ("one order", "bf16", "from scratch", "noise", "stages")  # whose losses are not those of the others


def draw(curves: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Writes a PNG of three panels, of seed 0: training loss by epoch; exact loss against bits; |a - m| / |a| by epoch.

    Args:
        curves: Of the JSON.
        path: Of the PNG.
        title: Above all of it.
    """
    first = {curve["name"]: curve for curve in curves if curve["seed"] == 0}
    with panels(path, 3, size=(17, 5), title=title) as (lines, ends, changes):
        for number, name in enumerate(_LINES):
            if name not in first:
                continue
            curve, style = first[name], {"label": name, "linewidth": 1.4, "color": f"C{number}"}
            if not name.endswith("noise"):
                lines.plot(curve["step"], curve["loss"], **style, linestyle="--" if name == "exact" else "-")
            points = [(epoch, ratio) for epoch, ratio in zip(curve["step"], curve["changes"], strict=True) if ratio]
            if points:
                changes.plot(*zip(*points, strict=True), **style)
        for name, curve in first.items():
            if not name.endswith(_OTHER_TASKS):
                at = curve["forward_bits"] + curve["backward_bits"], curve["samples"]
                ends.plot(*at, "o", markersize=4, color="tab:red" if name.startswith("AQ") else "tab:blue")
                if name in _LINES:
                    below = name in ("AQ gauss2/gauss4", "exact")  # where two names would lie over one another
                    ends.annotate(name, at, fontsize=7, xytext=(4, -9 if below else 4), textcoords="offset points")
        lines.set_xlabel("epoch")
        lines.set_ylabel("training loss (nats a byte; mean of an epoch)")
        ends.set_xlabel("bits an element, forward and backward together")
        ends.set_xscale("log", base=2)
        ends.set_xlim(right=130)
        ends.xaxis.set_major_formatter("{x:g}")
        ends.set_ylabel("exact loss of the samples after training (nats a byte)")
        changes.set_xlabel("epoch")
        changes.set_ylabel("|a - m| / |a|")
        changes.set_ylim(bottom=0)
        changes.axhline(0.3, color="tab:gray", linewidth=0.8)
        for axes in (lines, changes):
            axes.legend(fontsize=8)
        for axes in (lines, ends, changes):
            axes.grid(alpha=0.3, which="both")
