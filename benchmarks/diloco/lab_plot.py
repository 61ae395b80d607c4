"""Draws the rows of `diloco_lab`: the share of its speed that each case keeps on each link, and its loss against bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from convergence.panels import panels

from diloco.cases import ALONE
from diloco.lab_gates import SHARE

_COLOURS = ("#1f77b4", "#d62728", "#6baed6", "#ff9896")


def draw(links: list[dict[str, Any]], path: Path) -> None:
    """Writes a PNG of two panels.

    Args:
        links: Of the JSON, four at most.
        path: Of the PNG.
    """
    names = [row["name"] for row in links[0]["rows"] if row["name"] != ALONE]
    with panels(path, 2, size=(13, 5.5), title="outer loops on slow links") as (shares, losses):
        height = 0.8 / len(links)
        for number, (link, colour) in enumerate(zip(links, _COLOURS, strict=False)):
            named = {row["name"]: row for row in link["rows"]}
            places = [i + (number - (len(links) - 1) / 2) * height for i in range(len(names))]
            of_names = [named[name] for name in names]
            spread = (
                [row["share"] - row["share_least"] for row in of_names],
                [row["share_most"] - row["share"] for row in of_names],
            )
            shares.barh(
                places,
                [row["share"] for row in of_names],
                height,
                xerr=spread,
                color=colour,
                error_kw={"linewidth": 0.8},
                label=f"{link['sites']} sites, {link['rate']}",
            )
        shares.set_yticks(range(len(names)), names)
        shares.invert_yaxis()
        shares.axvline(SHARE, color="black", linewidth=0.8)
        shares.set_xlabel("tokens a second / without communication (median; least and most)")
        shares.set_xlim(0, 1.7)
        shares.legend(fontsize=8, loc="upper right")
        for row in links[0]["rows"]:
            if "loss" in row:
                at = row["sent"] / 1e6, row["loss"]
                losses.plot(*at, "s" if row["name"].startswith("torchft") else "o")
                # Cases of like bytes and loss stand on top of each other: factors' names to the left, those of sync below.
                left = "rank" in row["name"]
                below = row["name"].startswith("sync") and not left
                losses.annotate(
                    row["name"],
                    at,
                    fontsize=7,
                    xytext=(-4 if left else 4, -10 if below else 3),
                    textcoords="offset points",
                    ha="right" if left else "left",
                )
        losses.set_xscale("log")
        losses.set_xlim(0.06, 30)
        losses.set_xticks((0.1, 0.3, 1, 3, 10), ("0.1", "0.3", "1", "3", "10"))
        losses.minorticks_off()
        losses.set_xlabel(f"sent by a site an interval (MB), {links[0]['sites']} sites")
        losses.set_ylabel("validation loss (nats a byte)")
        losses.grid(alpha=0.3)
