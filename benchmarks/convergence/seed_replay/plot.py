"""Draws the runs of `convergence seed_replay`: loss against gradients, and against bytes, both on logarithmic axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pictures

_DASHED = ("float", "FedAvg")  # they lie under others
_LINES = ("byte", "float", "sign", "best η", "send_full_grad", "DDP", "DDP, best rate", "FedAvg")


def draw(curves: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Writes a PNG of two panels, of seed 0.

    Args:
        curves: Of the JSON.
        path: Of the PNG.
        title: Above both.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first = {curve["name"]: curve for curve in curves if curve["seed"] == 0}
    figure, (by_gradients, by_bytes) = pyplot.subplots(1, 2, figsize=(12, 4.8), dpi=120, layout="constrained")
    for name in (name for name in _LINES if name in first):
        curve = first[name]
        style = {"label": name, "linewidth": 1.4, "linestyle": "--" if name in _DASHED else "-"}
        a_step = curve["gradients"] / curve["step"][-1]
        by_gradients.plot([step * a_step for step in curve["step"]], curve["loss"], **style)
        sent = [(total / 1e3, loss) for total, loss in zip(curve["bytes"], curve["loss"], strict=True) if total]
        by_bytes.plot(*zip(*sent, strict=True), **style)
    by_gradients.set_xlabel("gradients of all machines, forward or backward")
    by_gradients.set_ylabel("loss on points that are not trained on (nats)")
    by_gradients.legend(fontsize=8)
    by_bytes.set_xlabel("sent by a machine (kB)")
    by_bytes.set_xscale("log")
    for axes in (by_gradients, by_bytes):
        axes.set_yscale("log")
        axes.grid(alpha=0.3, which="both")
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pictures.shrink(path)
    pyplot.close(figure)
