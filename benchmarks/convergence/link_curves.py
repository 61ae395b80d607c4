"""Loss against seconds on slow links: a run's losses, a step of each as long as it takes in the lab, or simulated (pipelines)."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from linklab import LabUnavailable
from result_pages import RESULTS
from steps.cases import Case
from steps.measure import measure

from convergence import panels
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
_RATE = re.compile(r"^(\d+)([mg])bit\b")
_STEPS = 3  # timed of every case, in turn: they differ by the link, not by the step


def of_cases(method: str, rate: str, configurations: Mapping[str, Any]) -> dict[str, float]:
    """{run's name: seconds a step} of the base model on 2 hosts, those of one of CASES; LabError when a rank fails."""
    wrapping, cases = CASES[method]
    _, rows = measure(wrapping, list(cases.values()), rate=rate, model="base", batch=8, repetitions=_STEPS)
    return {name: row.seconds for name, row in zip(cases, rows, strict=True)}


def of_record() -> dict[str, dict[str, float]]:
    """The same of the model of 10.7 million parameters as `steps fsdp` has recorded them: {rate: {run's name: seconds}}."""
    recorded = json.loads((RESULTS / "steps_fsdp.json").read_text())
    (link,) = recorded["links"]
    seconds = {row["name"]: row["seconds"] for row in link["rows"]}
    return {link["rate"]: {"exact, 10.7 M": seconds["lowcomm exact"], "W8G8, 10.7 M": seconds["lowcomm W8G8"]}}


# By a method of the convergence program: seconds a step at a rate, of the configurations in its JSON, measured in the lab.
MEASURED: dict[str, Callable[[str, Mapping[str, Any]], dict[str, float]]] = {
    **{method: functools.partial(of_cases, method) for method in CASES},
    "diloco": diloco_link.step_seconds,
}
# Methods whose losses are validation, with the module that has their `step_seconds` and `compared`.
SIMULATED = {"aq": pipeline_link, "aq_replicas": pipeline_link, "subspace": subspace_ratios}
DRAWN = (*MEASURED, *SIMULATED, "fsdp_tables")


def step_seconds(method: str, content: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """{rate: {run's name: seconds a step}}; {} with a sentence where there is no lab.

    Args:
        method: A method of the convergence program, one of DRAWN.
        content: Its JSON; what it has recorded of measured steps is taken.

    Raises:
        LabError: A rank failed.
    """
    if method in SIMULATED:
        return SIMULATED[method].step_seconds(content)
    if method == "fsdp_tables":
        return of_record()
    found: dict[str, dict[str, float]] = dict(content.get("step_seconds", {}))
    try:
        for rate in () if found else RATES:
            found[rate] = MEASURED[method](rate, content["configurations"])
            times = ", ".join(f"{name} {seconds:.3f}" for name, seconds in found[rate].items())
            print(f"# seconds a step at {rate}: {times}", flush=True)
    except LabUnavailable as error:
        print(f"# no loss against seconds: {error}")
    return found


def draw(
    curves: Sequence[Mapping[str, Any]], seconds: Mapping[str, Mapping[str, float]], path: Path, title: str
) -> None:
    """Writes a PNG with a panel a rate: each run's loss against time, the mean over seeds and their band.

    Of its last 10 steps; where a point of a curve is the mean of several, of its last 4 points; of validation as it is.
    """
    drawn = next(curve for curve in curves if curve["name"] in next(iter(seconds.values())))
    key, kind = ("validations", "validation") if drawn.get("validations") else ("loss", "training")
    rows = -(-len(seconds) // _COLUMNS)
    columns = -(-len(seconds) // rows)
    size = (max(4.6 * columns, 7.0), 4.2 * rows)
    runs = panels.by_name(curves)
    with panels.panels(path, columns, rows=rows, size=size, title=title) as grid:
        for axes, (rate, times) in zip(grid, seconds.items(), strict=True):
            longest = max(step_s * runs[name][0]["step"][-1] for name, step_s in times.items())
            # Minutes would be powers of ten below 1 on a logarithmic axis.
            unit_s, unit = panels.in_units(longest if len(seconds) == 1 or longest >= 7200 else 0)
            for number, (name, step_s) in enumerate(times.items()):
                steps = runs[name][0]["step"]
                recent = 1 if key == "validations" else 10 if steps[0] == 1 else 4
                places = [step_s * step / unit_s for step in steps]
                style = {"label": name, "linestyle": _LINES[number // 10]}
                panels.banded(axes, places, [curve[key] for curve in runs[name]], recent=recent, **style)
            axes.set_title(_RATE.sub(lambda found: f"{found[1]} {found[2].upper()}bit/s", rate))
            axes.set_xlabel(unit)
            if len(seconds) > 1:
                axes.set_xscale("log")
                axes.xaxis.set_minor_formatter("")  # labels between powers of ten would overlap
            else:
                axes.set_xlim(left=0)
            axes.grid(alpha=0.3)
        grid[0].set_ylabel(f"{kind} loss (nats a byte)")
        lines, names = grid[0].get_legend_handles_labels()
        grid[0].figure.legend(lines, names, loc="outside lower center", ncols=min(4, len(names)), fontsize=8)
