"""Draws the runs of `convergence aq`: loss by epoch and against bits, and the size of changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from convergence.panels import panels

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
    """Writes a PNG of three panels, of seed 0: both losses by step; validation against bits; |a - m| / |a| by step.

    Args:
        curves: Of the JSON.
        path: Of the PNG.
        title: Above all of it.
    """
    first = {curve["name"]: curve for curve in curves if curve["seed"] == 0}
    chosen = {name.removesuffix(_TEXT): curve for name, curve in first.items() if name.endswith(_TEXT)}
    chosen = chosen or {name: curve for name, curve in first.items() if name in _LINES} or first
    with panels(path, 3, size=(17, 5), title=title) as (lines, ends, changes):
        for number, (name, curve) in enumerate(chosen.items()):
            style = {"linewidth": 1.4, "color": f"C{number}"}
            lines.plot(curve["step"], curve["validations"], **style, label=name)
            lines.plot(curve["step"], curve["loss"], **style, linestyle=":")
            points = [(step, ratio) for step, ratio in zip(curve["step"], curve["changes"], strict=True) if ratio]
            if points:
                changes.plot(*zip(*points, strict=True), **style, label=name)
            at = curve["forward_bits"] + curve["backward_bits"], curve["validation"]
            ends.plot(*at, "o", markersize=4, color=f"C{number}")
            ends.annotate(name, at, fontsize=7, xytext=(4, 4), textcoords="offset points")
        lines.set_xlabel("steps")
        lines.set_ylabel("nats a byte: validation by exact messages; dotted: training")
        ends.set_xlabel("bits an element, forward and backward together")
        ends.set_xscale("log", base=2)
        ends.set_xlim(right=130)
        ends.xaxis.set_major_formatter("{x:g}")
        ends.set_ylabel("validation by exact messages after training (nats a byte)")
        changes.set_xlabel("steps")
        changes.set_ylabel("|a - m| / |a|")
        changes.set_ylim(bottom=0)
        changes.axhline(0.3, color="tab:gray", linewidth=0.8)
        lines.legend(fontsize=8)
        for axes in (lines, ends, changes):
            axes.grid(alpha=0.3, which="both")
