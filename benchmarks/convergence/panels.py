"""Pictures of panels next to one another: lines with a band over seeds, and points whose names do not overlap."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pictures

_UNITS = ((2 * 3600, 3600, "hours"), (1000, 60, "minutes"))


@contextlib.contextmanager
def panels(path: Path, count: int, *, size: tuple[float, float], title: str, rows: int = 1) -> Iterator[Any]:
    """Gives the axes of panels to draw on, and writes them as a PNG once the block is through.

    Args:
        path: Of the PNG; folders are made.
        count: Panels in a row.
        size: Of the picture in inches, width and height.
        title: Above all of it.
        rows: Rows of panels; the axes are then those of all rows, one after another.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, count, figsize=size, dpi=120, layout="constrained", squeeze=False)
    try:
        yield axes.flatten()
        figure.suptitle(title)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        pictures.shrink(path)
    finally:
        pyplot.close(figure)


def by_name(curves: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """{name of a run: its curves, one per seed}, in the order of the curves."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for curve in curves:
        found.setdefault(curve["name"], []).append(curve)
    return found


def banded(
    axes: Any, places: Sequence[float], of_seeds: Sequence[Sequence[float]], *, recent: int = 1, **style: Any
) -> None:
    """Draws the mean over seeds as a line, and the least to the most of them as a band.

    Args:
        axes: The panel.
        places: One x per point.
        of_seeds: Per seed, one y per point.
        recent: The number of points, up to and with each one, that it is the mean of.
        style: Of the line.
    """
    smooth = [[statistics.mean(ys[max(0, i + 1 - recent) : i + 1]) for i in range(len(ys))] for ys in of_seeds]
    points = list(zip(*smooth, strict=True))
    (line,) = axes.plot(places, [statistics.mean(ys) for ys in points], **{"linewidth": 1.5} | style)
    if len(of_seeds) > 1:
        least, most = [min(ys) for ys in points], [max(ys) for ys in points]
        axes.fill_between(places, least, most, color=line.get_color(), alpha=0.2, linewidth=0)


def in_units(seconds: float) -> tuple[float, str]:
    """(seconds of the unit, its name) that suits a time as long as `seconds`."""
    return next(((unit, name) for least, unit, name in _UNITS if seconds >= least), (1.0, "seconds"))


def named_points(axes: Any, points: Mapping[str, tuple[float, float]], *, fontsize: float = 7) -> None:
    """Writes each point's name beside it where it covers neither a point nor another name; a thin line leads to it.

    Call it once scales and limits are set: it looks for the nearest free place in pixels.
    """
    figure = axes.figure
    figure.canvas.draw()
    here = {name: axes.transData.transform(at) for name, at in points.items()}
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in here.values()]
    edge = axes.get_window_extent()
    points_a_pixel = 72 / figure.dpi
    for name, (x, y) in sorted(here.items(), key=lambda item: -item[1][1]):
        text = axes.annotate(name, points[name], xytext=(0, 0), textcoords="offset points", fontsize=fontsize)
        extent = text.get_window_extent()
        text.remove()
        for right, up in _offsets(extent.width, extent.height):
            box = (x + right, y + up, x + right + extent.width, y + up + extent.height)
            inside = edge.x0 <= box[0] and box[2] <= edge.x1 and edge.y0 <= box[1] and box[3] <= edge.y1
            if inside and not any(_overlap(box, other) for other in taken):
                break
        taken.append(box)
        axes.annotate(
            name,
            points[name],
            xytext=(right * points_a_pixel, up * points_a_pixel),
            textcoords="offset points",
            fontsize=fontsize,
            arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": "tab:gray", "shrinkA": 0, "shrinkB": 2},
        )


def _offsets(width: float, height: float) -> Iterator[tuple[float, float]]:
    """Places of a name's lower left corner beside its point, in pixels, the nearest first."""
    for step in range(16):
        for up in (step * height / 2, -step * height / 2):
            yield 7 + 2 * step, up - height / 2
            yield -7 - 2 * step - width, up - height / 2


def _overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
