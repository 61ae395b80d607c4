"""Pictures of runs: loss against bytes, and against seconds on links.

A line is the mean over seeds, its band the least to the most of them.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pictures

_COLUMNS = 4  # of panels, at most
_LINES = ("-", "--", ":")  # matplotlib has ten colours
_RATE = re.compile(r"^(\d+)([mg])bit\b")
_UNITS = ((7200, 3600, "hours"), (1000, 60, "minutes"))  # (least seconds, seconds of the unit, its name)


def bytes_sent(curves: list[dict[str, Any]], path: Path, *, title: str, names: Sequence[str] = ()) -> None:
    """Draws the runs of these names that counted bytes; where there are none of them, the longest runs that did."""
    counted = _by_name([curve for curve in curves if curve["bytes"][-1]])
    longest = max(of_seeds[0]["step"][-1] for of_seeds in counted.values())
    runs = {name: counted[name] for name in names if name in counted}
    runs = runs or {name: of_seeds for name, of_seeds in counted.items() if of_seeds[0]["step"][-1] == longest}
    figure, (axes,) = _panels(1, 1, (7.2, 4.4), title)
    for name, of_seeds in runs.items():
        sent = [total / 1e6 for total in of_seeds[0]["bytes"] if total]
        losses = [curve["loss"][-len(sent) :] for curve in of_seeds]
        _banded(axes, sent, losses, recent=_recent(of_seeds[0]), label=name)
    totals = [of_seeds[0]["bytes"][-1] for of_seeds in runs.values()]
    if max(totals) > 5 * min(totals):
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    axes.set_xlabel("sent by a rank (MB)")
    axes.set_ylabel("loss (nats)")
    axes.legend(fontsize=8)
    _write(figure, path)


def seconds(
    curves: Sequence[Mapping[str, Any]], times: Mapping[str, Mapping[str, float]], path: Path, title: str
) -> None:
    """Writes a PNG with a panel a link: each run's loss against time, validation where the runs have it. `times` has by link the
    seconds a step of each run.
    """
    runs = _by_name(curves)
    validated = "validations" in curves[0]
    rows = -(-len(times) // _COLUMNS)
    columns = -(-len(times) // rows)
    figure, panels = _panels(rows, columns, (max(4.6 * columns, 7.0), 4.2 * rows), title)
    for axes, (link, of_runs) in zip(panels, times.items(), strict=True):
        unit_s, unit = _unit(max(step_s * runs[name][0]["step"][-1] for name, step_s in of_runs.items()), len(times))
        for number, (name, step_s) in enumerate(of_runs.items()):
            first = runs[name][0]
            losses = [curve["validations" if validated else "loss"] for curve in runs[name]]
            ends = [step_s * step / unit_s for step in first["step"]]
            style = {"label": name, "linestyle": _LINES[number // 10]}
            _banded(axes, ends, losses, recent=1 if validated else _recent(first), **style)
        axes.set_title(_RATE.sub(lambda rate: f"{rate[1]} {rate[2].upper()}bit/s", link))
        axes.set_xlabel(unit)
        if len(times) > 1:
            axes.set_xscale("log")
            axes.xaxis.set_minor_formatter("")  # labels between powers of ten would lie on one another
        else:
            axes.set_xlim(left=0)
    panels[0].set_ylabel(f"{'validation' if validated else 'training'} loss (nats a byte)")
    lines, names = panels[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=min(4, len(names)), fontsize=8)
    _write(figure, path)


def _by_name(curves: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for curve in curves:
        found.setdefault(curve["name"], []).append(curve)
    return found


def _recent(curve: Mapping[str, Any]) -> int:
    """How many points, up to and with each one, a point of the line is the mean of: more where a point is one step."""
    return 10 if curve["step"][:2] == [1, 2] else 4


def _banded(
    axes: Any, places: Sequence[float], of_seeds: Sequence[Sequence[float]], *, recent: int, **style: Any
) -> None:
    smooth = [[statistics.mean(ys[max(0, i + 1 - recent) : i + 1]) for i in range(len(ys))] for ys in of_seeds]
    points = list(zip(*smooth, strict=True))
    (line,) = axes.plot(places, [statistics.mean(ys) for ys in points], linewidth=1.6, **style)
    if len(of_seeds) > 1:
        least, most = [min(ys) for ys in points], [max(ys) for ys in points]
        axes.fill_between(places, least, most, color=line.get_color(), alpha=0.2, linewidth=0)


def _unit(longest_s: float, panels: int) -> tuple[float, str]:
    """(seconds of the unit, its name); minutes only on the linear axis of a single panel."""
    fitting = (unit for least, *unit in _UNITS if longest_s >= least and (panels == 1 or unit[1] == "hours"))
    return tuple(next(fitting, (1.0, "seconds")))


def _panels(rows: int, columns: int, size: tuple[float, float], title: str) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(rows, columns, figsize=size, dpi=120, layout="constrained", squeeze=False)
    figure.suptitle(title)
    for axes in grid.flat:
        axes.grid(alpha=0.3)
    return figure, grid.flatten()


def _write(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pictures.shrink(path)
    pyplot.close(figure)
