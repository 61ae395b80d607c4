"""A picture of some panels next to one another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pictures


@contextlib.contextmanager
def panels(path: Path, count: int, *, size: tuple[float, float], title: str) -> Iterator[Any]:
    """Gives the axes of panels to draw on, and writes them as a PNG once the block is through.

    Args:
        path: Of the PNG; folders are made.
        count: Panels, two or more.
        size: Of the picture in inches, width and height.
        title: Above all of it.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, count, figsize=size, dpi=120, layout="constrained")
    try:
        yield axes
        figure.suptitle(title)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        pictures.shrink(path)
    finally:
        pyplot.close(figure)
