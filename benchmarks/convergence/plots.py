"""Pictures of runs: loss against bytes, and of pipelines validation against simulated seconds on links."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pictures

_COLUMNS = 4  # of panels, at most
_LINES = ("-", "--", ":")  # matplotlib has ten colours


def bytes_sent(curves: list[dict[str, Any]], path: Path, *, title: str, names: list[str] | None = None) -> None:
    """Draws seed 0's curves of the runs that counted bytes, short ones left out; `names`: of those of them that are there."""
    import plot

    longest = max(len(curve["step"]) for curve in curves)
    chosen = [curve for curve in curves if curve["seed"] == 0 and len(curve["step"]) == longest and curve["bytes"][-1]]
    chosen = [curve for curve in chosen if curve["name"] in (names or ())] or chosen
    recent = 10 if chosen[0]["step"][0] == 1 else 4
    lines = [plot.Curve(curve["name"], curve["loss"], curve["bytes"]) for curve in chosen]
    plot.loss_against_bytes(lines, path, title=title, recent=recent)
    pictures.shrink(path)


def seconds(
    curves: Sequence[Mapping[str, Any]], times: Mapping[str, Mapping[str, float]], path: Path, title: str
) -> None:
    """Writes a PNG with a panel a link: validation of each run, the mean over seeds, against seconds.

    Args:
        curves: Of the JSON.
        times: By link the seconds a step of each run.
        path: Of the PNG.
        title: Above all of it.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = -(-len(times) // _COLUMNS)
    columns = -(-len(times) // rows)
    size = (4.6 * columns, 4.2 * rows)
    figure, grid = pyplot.subplots(rows, columns, figsize=size, dpi=100, layout="constrained", squeeze=False)
    panels = grid.flatten()
    for axes, (link, of_runs) in zip(panels, times.items(), strict=True):
        for number, (name, step_s) in enumerate(of_runs.items()):
            of_name = [curve for curve in curves if curve["name"] == name]
            mean = [statistics.mean(step) for step in zip(*(curve["validations"] for curve in of_name), strict=True)]
            ends = [step_s * step for step in of_name[0]["step"]]
            axes.plot(ends, mean, label=name, linewidth=1.6, linestyle=_LINES[number // 10])
        axes.set_title(link)
        axes.set_xlabel("seconds")
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter("")  # labels between powers of ten would lie on one another
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("validation loss (nats a byte)")
    lines, names = panels[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=min(4, len(names)), fontsize=8)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pictures.shrink(path)
    pyplot.close(figure)
