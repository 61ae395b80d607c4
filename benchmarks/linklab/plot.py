"""Draws the standard set: seconds of each op by link, and bytes by ranks."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pictures

from linklab.rank import CODED, CODED_TCP, EXACT, EXACT_TCP, GLOO, RAW

_COLOURS = {
    GLOO: "#8c8c8c",
    EXACT: "#4c72b0",
    CODED: "#dd8452",
    EXACT_TCP: "#8172b3",
    CODED_TCP: "#c44e52",
    RAW: "#55a868",
}
_TITLES = {
    "100mbit": "2 ranks, 100 Mbit/s, 16 MiB",
    "1gbit": "2 ranks, 1 Gbit/s, 64 MiB",
    "unshaped": "2 ranks, unshaped, 64 MiB",
    "4ranks": "4 ranks, 100 Mbit/s, 16 MiB",
}


def draw(rows: list[dict[str, Any]], counts: list[dict[str, Any]], path: Path) -> None:
    """Writes a PNG: a panel a set (bars: medians, whiskers: quartiles; the tick: the ideal), one of bytes by ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row["set"] for row in rows))
    panels = len(names) + bool(counts)
    columns = min(3, panels)
    lines = -(-panels // columns)
    size = (4.6 * columns, 3.6 * lines + 0.4)
    figure, grid = pyplot.subplots(lines, columns, figsize=size, dpi=130, layout="constrained", squeeze=False)
    axes = list(grid.flat)
    for name, panel in zip(names, axes, strict=False):
        _seconds(panel, [row for row in rows if row["set"] == name])
        panel.set_title(_TITLES[name], fontsize=10)
    if counts:
        _bytes(axes[len(names)], counts)
    for unused in axes[panels:]:
        unused.set_visible(False)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in _COLOURS.values()]
    handles.append(pyplot.Line2D([], [], color="black", linewidth=1.5))
    labels = [*_COLOURS, "ideal of the bytes sent"]
    figure.legend(
        handles, labels, loc="outside lower center", ncols=3 if columns == 1 else len(labels), fontsize=9, frameon=False
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pictures.shrink(path)
    pyplot.close(figure)


def _seconds(axes: Any, rows: list[dict[str, Any]]) -> None:
    ops = list(dict.fromkeys(row["op"] for row in rows))
    width = 0.8 / len(_COLOURS)
    for row in rows:
        place = ops.index(row["op"]) - 0.4 + width * (list(_COLOURS).index(row["group"]) + 0.5)
        if "refused" in row:
            axes.text(
                place,
                0.02,
                "refused",
                rotation=90,
                ha="center",
                va="bottom",
                fontsize=7,
                transform=axes.get_xaxis_transform(),
            )
            continue
        low, median, high = (second * 1e3 for second in statistics.quantiles(row["seconds"], n=4))
        axes.bar(place, median, width, color=_COLOURS[row["group"]])
        axes.vlines(place, low, high, color="black", linewidth=0.8)
        if row["of_ideal"]:
            axes.hlines(row["of_ideal"] * median, place - width / 2, place + width / 2, color="black", linewidth=1.5)
        text = f"{row['times_gloo']:.1f}×" if row["group"] == CODED else ""
        axes.annotate(text, (place, max(median, high)), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    axes.set_yscale("log")
    axes.set_ylim(bottom=min(row["median_s"] for row in rows if "refused" not in row) * 1e3 / 3)
    axes.set_xticks(range(len(ops)), ops, fontsize=8)
    axes.set_ylabel("median (ms)")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _bytes(axes: Any, counts: list[dict[str, Any]]) -> None:
    from matplotlib.ticker import ScalarFormatter

    markers = {"all_reduce": "o", "all_gather": "s", "reduce_scatter": "^"}
    for op, group in dict.fromkeys((row["op"], row["group"]) for row in counts):
        mine = [row for row in counts if (row["op"], row["group"]) == (op, group) and row.get("counted_bytes")]
        if mine:
            sizes = [row["ranks"] for row in mine]
            megabytes = [row["counted_bytes"] / 1e6 for row in mine]
            style = {"color": _COLOURS[group], "marker": markers[op], "markersize": 5, "fillstyle": "none"}
            axes.plot(sizes, megabytes, linewidth=0, label=f"{op}, {group}", **style)
            whole = megabytes[0] / 0.5
            axes.plot(sizes, [whole * (size - 1) / size for size in sizes], color=_COLOURS[group], linewidth=0.7)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(ScalarFormatter())
    axes.tick_params(axis="y", which="both", labelsize=8)
    axes.set_title("a rank's bytes by ranks, 3.3 MiB; line: (W−1)/W", fontsize=10)
    axes.set_xlabel("ranks W")
    axes.set_ylabel("sent by a rank (MB)")
    axes.grid(alpha=0.3)
    # Next to the lines, which fill the panel, where no panel is.
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.02, 1.0)).set_in_layout(False)
