"""Losses, bytes and last ranks of DiLoCoX's Table 1 as `convergence diloco_table1` recorded them, for its column of speed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convergence.diloco.table1 import ROWS
from result_pages import RESULTS

RECORDED = RESULTS / "diloco_table1.json"


def recorded(path: Path = RECORDED) -> dict[str, Any]:
    """The claims about the recorded result.

    Returns:
        `commit` that was measured; `seeds`; and `rows` by name: `loss` (mean over seeds), `loss_by_exact` (mean over seeds of
        the loss / AllReduce's), `ratio` (times fewer bytes, mean), and of runs that adapt `last_rank` and `last_every` (of the
        last outer step, mean).
    """
    content = json.loads(path.read_text())
    runs: dict[str, dict[int, Mapping[str, Any]]] = {name: {} for name in ROWS}
    for curve in content["curves"]:
        runs[curve["name"]][curve["seed"]] = curve
    exact = runs["AllReduce"]
    rows: dict[str, dict[str, float]] = {}
    for name, seeds in runs.items():
        rows[name] = {
            "loss": statistics.mean(curve["validation"] for curve in seeds.values()),
            "loss_by_exact": statistics.mean(c["validation"] / exact[seed]["validation"] for seed, c in seeds.items()),
            "ratio": statistics.mean(curve["ratio"] for curve in seeds.values()),
        }
        if ROWS[name].configuration.outer.get("adapt_rank"):
            last = [curve["outer"][-1] for curve in seeds.values()]
            rows[name]["last_rank"] = statistics.mean(outer["rank"] for outer in last)
            rows[name]["last_every"] = statistics.mean(outer["sync_every"] for outer in last)
    versions = content["versions"]
    return {"commit": versions.get("commit", versions.get("recorded_in")), "seeds": len(exact), "rows": rows}


def at_the_end(row: Mapping[str, float]) -> dict[str, Any]:
    """The rank and interval with which a run that adapts ended, as options of `lc.DiLoCoX`; {} of the others."""
    return {"rank": round(row["last_rank"]), "sync_every": round(row["last_every"])} if "last_rank" in row else {}
