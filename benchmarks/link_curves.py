"""Loss against seconds on slow links: a run's losses, a step of each as long as it takes in the lab."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from linklab import LabUnavailable
from steps.cases import Case
from steps.measure import measure

RATES = ("10mbit", "100mbit", "1gbit")
# A method's runs that are drawn: how `steps` wraps the model, and by a run's name how its steps travel.
DRAWN: dict[str, tuple[str, dict[str, Case]]] = {
    "qsdp": (
        "fsdp",
        {
            "exact": Case("exact", weights="none", gradients="none"),
            "W8G8/1024": Case("W8G8/1024", weights="minmax8:bucket=1024", gradients="qsgd8:bucket=1024"),
        },
    ),
    "ddp": (
        "ddp",
        {
            "exact": Case("exact"),
            "sym4": Case("sym4", hook="lowcomm", codec="sym4:bucket=128"),
            "rank 4, sym4": Case("rank 4, sym4", hook="lowcomm", codec="sym4:bucket=128", rank=4),
            "rank 4, sym8/sym4": Case(
                "rank 4, sym8/sym4", hook="lowcomm", codec="sym4:bucket=128", rank=4, projection="sym8:bucket=128"
            ),
            "PowerSGD rank 4": Case("PowerSGD rank 4", "gloo", hook="powersgd", rank=4),
        },
    ),
}
_STEPS = 3  # timed of every case, in turn: they differ by the link, not by the step


def step_seconds(method: str) -> dict[str, dict[str, float]]:
    """{rate: {run's name: seconds a step}} of the base model on 2 hosts; {} with a sentence where there is no lab.

    Args:
        method: Of convergence.py, one of DRAWN.

    Raises:
        LabError: A rank failed.
    """
    wrapping, cases = DRAWN[method]
    found: dict[str, dict[str, float]] = {}
    try:
        for rate in RATES:
            _, rows = measure(wrapping, list(cases.values()), rate=rate, model="base", batch=8, repetitions=_STEPS)
            found[rate] = {name: row.seconds for name, row in zip(cases, rows, strict=True)}
    except LabUnavailable as error:
        print(f"# no loss against seconds: {error}")
    return found


def draw(
    curves: Sequence[Mapping[str, Any]], seconds: Mapping[str, Mapping[str, float]], path: Path, title: str
) -> None:
    """Writes a PNG with a panel a rate: the mean over seeds of each run's loss (of its last 10 steps) against seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(seconds), figsize=(4.6 * len(seconds), 4.2), dpi=140, layout="constrained")
    for axes, (rate, times) in zip(panels, seconds.items(), strict=True):
        for name, step_s in times.items():
            losses = [curve["loss"] for curve in curves if curve["name"] == name]
            mean = [statistics.mean(step) for step in zip(*losses, strict=True)]
            recent = [statistics.mean(mean[max(0, i - 9) : i + 1]) for i in range(len(mean))]
            axes.plot([step_s * (i + 1) for i in range(len(mean))], recent, label=name, linewidth=1.6)
        axes.set_title(rate)
        axes.set_xlabel("seconds")
        axes.set_xscale("log")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("training loss (nats a byte)")
    panels[0].legend(fontsize=7)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
