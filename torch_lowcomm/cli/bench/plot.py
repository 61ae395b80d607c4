"""Draws time and bus bandwidth against size."""

import importlib.util
from pathlib import Path
from typing import Any

from torch_lowcomm.cli.bench.report import first_form


def expect_matplotlib() -> None:
    """Raises ValueError if there is no matplotlib, before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot: expected matplotlib to be installed (pip install matplotlib), found none")


def draw(rows: list[dict[str, Any]], path: Path, *, title: str) -> None:
    """Draws the median time, with a band down to the fastest call, and the bus bandwidth, of the group and its peer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = [row["size_bytes"] for row in rows]
    forms = {"lowcomm": [first_form(row) for row in rows]}
    if forms["lowcomm"][0]["peer"]:
        forms[forms["lowcomm"][0]["peer"]["backend"]] = [form["peer"] for form in forms["lowcomm"]]
    figure, (times, widths) = pyplot.subplots(1, 2, figsize=(10, 4.2), dpi=140, layout="constrained")
    for name, of in forms.items():
        (drawn,) = times.plot(sizes, [form["time_us"] for form in of], marker="o", label=name)
        times.fill_between(
            sizes, [form["min_us"] for form in of], [form["time_us"] for form in of], alpha=0.2, color=drawn.get_color()
        )
        widths.plot(sizes, [form["busbw_gb_s"] for form in of], marker="o", label=name)
    if forms["lowcomm"][0]["ideal_us"]:
        times.plot(sizes, [form["ideal_us"] for form in forms["lowcomm"]], "k--", label="link, of lowcomm's bytes")
    times.set_ylabel("median time (us), down to the fastest")
    widths.set_ylabel("bus bandwidth (GB/s of exact bytes)")
    for axes in (times, widths):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("size (bytes)")
        axes.grid(alpha=0.3)
        axes.legend()
    times.set_yscale("log")
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
