"""Loss against seconds on slow links: a run's losses, a step of each as long as it takes in the lab, or simulated (pipelines)."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pictures
from linklab import LabUnavailable
from steps.cases import Case
from steps.measure import measure

from convergence.diloco import link as diloco_link
from convergence.pipeline import link as pipeline_link
from convergence.subspace import ratios as subspace_ratios

RATES = ("10mbit", "100mbit", "1gbit")
# Of methods whose steps are all alike: how `steps` wraps the model, and by a run's name how its steps travel.
CASES: dict[str, tuple[str, dict[str, Case]]] = {
    "fsdp": (
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
_COLUMNS = 4  # of panels, at most
_LINES = ("-", "--", ":")  # matplotlib has ten colours
_STEPS = 3  # timed of every case, in turn: they differ by the link, not by the step


def of_cases(method: str, rate: str, configurations: Mapping[str, Any]) -> dict[str, float]:
    """{run's name: seconds a step} of the base model on 2 hosts, those of one of CASES; LabError when a rank fails."""
    wrapping, cases = CASES[method]
    _, rows = measure(wrapping, list(cases.values()), rate=rate, model="base", batch=8, repetitions=_STEPS)
    return {name: row.seconds for name, row in zip(cases, rows, strict=True)}


# By a method of the convergence program: seconds a step at a rate, of the configurations in its JSON, measured in the lab.
MEASURED: dict[str, Callable[[str, Mapping[str, Any]], dict[str, float]]] = {
    **{method: functools.partial(of_cases, method) for method in CASES},
    "diloco": diloco_link.step_seconds,
}
# Methods whose losses are validation, with the module that has their `step_seconds` and `compared`.
SIMULATED = {"aq": pipeline_link, "aq_replicas": pipeline_link, "subspace": subspace_ratios}
DRAWN = (*MEASURED, *SIMULATED)


def step_seconds(method: str, content: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """{rate: {run's name: seconds a step}}; {} with a sentence where there is no lab.

    Args:
        method: A method of the convergence program, one of DRAWN.
        content: Its JSON.

    Raises:
        LabError: A rank failed.
    """
    if method in SIMULATED:
        return SIMULATED[method].step_seconds(content)
    found: dict[str, dict[str, float]] = {}
    try:
        for rate in RATES:
            found[rate] = MEASURED[method](rate, content["configurations"])
            times = ", ".join(f"{name} {seconds:.3f}" for name, seconds in found[rate].items())
            print(f"# seconds a step at {rate}: {times}", flush=True)
    except LabUnavailable as error:
        print(f"# no loss against seconds: {error}")
    return found


def draw(
    curves: Sequence[Mapping[str, Any]], seconds: Mapping[str, Mapping[str, float]], path: Path, title: str
) -> None:
    """Writes a PNG with a panel a rate: the mean over seeds of each run's loss against seconds.

    Of its last 10 steps; where a point of a curve is the mean of several, of its last 4 points; of validation as it is.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = next(curve for curve in curves if curve["name"] in next(iter(seconds.values())))
    key, kind = ("validations", "validation") if drawn.get("validations") else ("loss", "training")
    rows = -(-len(seconds) // _COLUMNS)
    columns = -(-len(seconds) // rows)
    size = (4.6 * columns, 4.2 * rows)
    figure, grid = pyplot.subplots(rows, columns, figsize=size, dpi=100, layout="constrained", squeeze=False)
    panels = grid.flatten()
    for axes, (rate, times) in zip(panels, seconds.items(), strict=True):
        for number, (name, step_s) in enumerate(times.items()):
            of_name = [curve for curve in curves if curve["name"] == name]
            mean = [statistics.mean(step) for step in zip(*(curve[key] for curve in of_name), strict=True)]
            steps = of_name[0]["step"]
            last = 1 if key == "validations" else 10 if steps[0] == 1 else 4
            recent = [statistics.mean(mean[max(0, i + 1 - last) : i + 1]) for i in range(len(mean))]
            axes.plot(
                [step_s * step for step in steps], recent, label=name, linewidth=1.6, linestyle=_LINES[number // 10]
            )
        axes.set_title(rate)
        axes.set_xlabel("seconds")
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter("")  # labels between powers of ten would overlap
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(f"{kind} loss (nats a byte)")
    lines, names = panels[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=min(4, len(names)), fontsize=8)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pictures.shrink(path)
    pyplot.close(figure)
