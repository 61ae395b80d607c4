"""Residuals of error feedback in 8 bits next to float32: whether the loss of `lc.DiLoCoX` moves.

What 8 bits lose of a residual is lost. A wrong residual does no harm at once: it is added to the next pseudo-gradient, whose
own loss by compression is some ten times as large.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from report import Gate

from convergence.diloco import runs as diloco_runs
from convergence.diloco.rank import Configuration
from torch_lowcomm.diloco import presets
from torch_lowcomm.diloco.presets import INT4

_SYNC: dict[str, Any] = presets.diloco(sync_every=20) | {"codec": INT4, "error_feedback": True}
# Where a residual holds more than the message: what factors leave out, and an interval late.
_ROWS: Mapping[str, Mapping[str, Any]] = {
    "sync": _SYNC,
    "continue": {"sync_every": 20, "mode": "continue", "codec": INT4, "error_feedback": True},
    "sync, rank 16": _SYNC | {"rank": 16, "outer_momentum": 0.6},
}
_TYPES = ("float32", "int8")
BOUND = 1.005  # of the mean ratio of losses; the float32 runs of a row differ by more from seed to seed


def rows(*, quick: bool) -> dict[str, Configuration]:
    """The runs by name, two for each setting."""
    found = {
        f"{name}, {kept}": Configuration(outer={**outer, "residual_dtype": kept})
        for name, outer in _ROWS.items()
        for kept in _TYPES
    }
    return (
        {name: diloco_runs.shortened(c) for name, c in found.items() if name.startswith("sync, ")} if quick else found
    )


def measure(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """Runs every row; prints it.

    Args:
        quick: 80 steps, and not every setting.
        seeds: Of every run.

    Returns:
        `configurations` and `curves` for the JSON, and the gates.
    """
    diloco_runs.print_heading()
    known = rows(quick=quick)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in known}
    for seed in range(seeds):
        for name, configuration in known.items():
            runs[name].append(diloco_runs.run(name, dataclasses.replace(configuration, seed=seed)))
    return {
        "configurations": {name: dataclasses.asdict(configuration) for name, configuration in known.items()},
        "curves": [diloco_runs.curve(entry) for of_name in runs.values() for entry in of_name],
    }, gates(runs)


def gates(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Gate]:
    """The loss with 8 bits over that with float32, seed by seed."""
    found = []
    for name in _ROWS:
        wide, narrow = (runs.get(f"{name}, {kept}", []) for kept in _TYPES)
        if not wide:
            continue
        ratios = [a["validation"] / b["validation"] for a, b in zip(narrow, wide, strict=True)]
        error = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else 0.0
        said = ", ".join(f"{ratio:.4f}" for ratio in ratios)
        print(f"# {name}: loss int8 / float32: mean {statistics.mean(ratios):.4f}, standard error {error:.4f} ({said})")
        found.append(Gate(f"{name}: loss int8 / float32", statistics.mean(ratios), "<", BOUND))
    return found
