"""Draws the runs of `convergence seed_replay`: loss against gradients, and against bytes, both on logarithmic axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from convergence.panels import banded, by_name, panels

_DASHED = ("float", "FedAvg")  # they lie under others
_LINES = ("byte", "float", "sign", "best η", "send_full_grad", "DDP", "DDP, best rate", "FedAvg")


def draw(curves: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Writes a PNG of two panels, means over seeds.

    Args:
        curves: Of the JSON.
        path: Of the PNG.
        title: Above both.
    """
    runs = by_name(curves)
    with panels(path, 2, size=(12, 4.8), title=title) as (by_gradients, by_bytes):
        for name in (name for name in _LINES if name in runs):
            first, losses = runs[name][0], [curve["loss"] for curve in runs[name]]
            style = {"label": name, "linestyle": "--" if name in _DASHED else "-"}
            a_step = first["gradients"] / first["step"][-1]
            banded(by_gradients, [step * a_step for step in first["step"]], losses, **style)
            sent = [total / 1e3 for total in first["bytes"] if total]
            banded(by_bytes, sent, [loss[-len(sent) :] for loss in losses], **style)
        by_gradients.set_xlabel("gradients of all machines, forward or backward")
        by_gradients.set_ylabel("loss on points that are not trained on (nats)")
        by_gradients.legend(fontsize=8)
        by_bytes.set_xlabel("sent by a machine (kB)")
        by_bytes.set_xscale("log")
        for axes in (by_gradients, by_bytes):
            axes.set_yscale("log")
            axes.grid(alpha=0.3, which="both")
