"""DiLoCoX and what else talks seldom: loss against bytes, each a few real processes over loopback, paired seeds.

The runs are those of presets.py, and OpenDiLoCo and CocktailSGD compressed as much as DiLoCoX of seed 0 was.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from typing import Any

import launch
import model
from report import Gate

import torch_lowcomm as lc
from convergence.diloco import gates as diloco_gates
from convergence.diloco import message_bytes
from convergence.diloco import presets as diloco_presets
from convergence.diloco import rank as diloco_rank
from convergence.diloco.cocktail import codec_text
from convergence.diloco.presets import PRESETS
from convergence.diloco.rank import SHAPE, Configuration

QUICK = ("all_reduce", "DiLoCo", "DiLoCo, int4 EF", "H=5 continue", "DiLoCoX")
POINT = 5  # steps to a point of a curve, which has their mean loss
PARAMETERS = [tuple(parameter.shape) for parameter in model.GPT(SHAPE).parameters()]
ELEMENTS = sum(math.prod(shape) for shape in PARAMETERS)


def measure(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """Runs everything; prints a row a run.

    Args:
        quick: 80 steps, a few runs with shorter intervals, and bounds that are loose or those of arithmetic.
        seeds: Of the runs that are compared; the others have one.

    Returns:
        `configurations` and `curves` for the JSON, and the gates.
    """
    presets = {name: shortened(PRESETS[name]) for name in QUICK} if quick else PRESETS
    print_heading()
    full = run("DiLoCoX", presets["DiLoCoX"])
    if not quick:
        presets = presets | equally_compressed(full)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in presets} | {"DiLoCoX": [full]}
    for seed in range(seeds):
        for name, configuration in presets.items():
            if len(runs[name]) == seed and (seed == 0 or name in diloco_gates.PAIRED):
                runs[name].append(run(name, dataclasses.replace(configuration, seed=seed)))
    entries = [entry for of_name in runs.values() for entry in of_name]
    return {
        "parameters": ELEMENTS,
        "configurations": {name: dataclasses.asdict(of_name[0]["configuration"]) for name, of_name in runs.items()},
        "curves": [curve(entry) for entry in entries],
    }, diloco_gates.gates(runs, quick=quick)


def print_heading() -> None:
    """Prints the heading of the rows of `run`."""
    print(f"# {ELEMENTS} parameters")
    print(
        f"# {'run':<26}{'seed':>5}{'D':>3}{'loss':>9}{'outer':>7}{'MB':>10}{'ratio':>9}{'no places':>11}{'seconds':>9}"
    )


def shortened(configuration: Configuration) -> Configuration:
    """For 80 steps: outer steps enough for the rank to follow them."""
    outer = dict(configuration.outer)
    if outer:
        outer["sync_every"] = min(outer["sync_every"], 10)
    if outer.get("adapt_rank"):
        outer["sync_warmup"] = 1
    return dataclasses.replace(configuration, outer=outer, steps=80, warm_up=20)


def equally_compressed(full: dict[str, Any]) -> dict[str, Configuration]:
    """OpenDiLoCo and CocktailSGD that send as many bits as DiLoCoX did.

    OpenDiLoCo sends so seldom that it cannot do so quite: it has the nearest number of outer steps, and one more. The last
    CocktailSGD has its places uncounted.
    """
    steps = full["configuration"].steps
    nearest = max(1, round(steps / full["ratio"]))
    return {
        "OpenDiLoCo": diloco_presets.open_diloco(nearest, steps),
        "OpenDiLoCo, one more": diloco_presets.open_diloco(nearest + 1, steps),
        "CocktailSGD": diloco_presets.cocktail(keep_of(full["bytes"][-1] / steps, places=True)),
        "CocktailSGD, places free": diloco_presets.cocktail(keep_of(full["bytes"][-1] / steps, places=False)),
    }


def keep_of(budget: float, *, places: bool, stride: int = 10) -> float:
    """The share that CocktailSGD keeps with so many bytes a step, its frames not counted, its places as `places` says."""
    low, high = 1e-4, 1.0
    for _ in range(40):
        keep = (low + high) / 2
        sent = cocktail_step(keep, stride)
        below = sent.payload - (0 if places else sent.places) < budget
        low, high = (keep, high) if below else (low, keep)
    return round(high, 6)


def cocktail_step(keep: float, stride: int) -> message_bytes.Sent:
    """Returns the bytes of a step of CocktailSGD by the formula, for the first of two ranks."""
    return message_bytes.all_reduce([math.ceil(ELEMENTS / stride)], lc.codec(codec_text(keep)), 2, 0, rotates=False)


def run(name: str, configuration: Configuration) -> dict[str, Any]:
    """Runs one configuration in fresh processes and prints its row (bytes: rank 0's)."""
    c = configuration
    deadline_s = 120 + 2.0 * c.steps
    ranks = launch.run(diloco_rank.train, ranks=c.ranks, deadline_s=deadline_s, configuration=c)
    entry = {"name": name, "configuration": c, **ranks[0]}
    formula = by_formula(entry)
    sent = entry["bytes"][-1]
    entry["formula"] = formula.total
    entry["ratio"], entry["ratio_without_places"] = (
        2 * ELEMENTS * c.steps / bytes_ for bytes_ in (sent, sent - formula.places)
    )
    print(
        f"  {name:<26}{c.seed:>5}{c.ranks:>3}{entry['validation']:>9.4f}{len(entry['outer']):>7}{sent / 1e6:>10.3f}"
        f"{entry['ratio']:>9.1f}{entry['ratio_without_places']:>11.1f}{entry['seconds'][-1]:>9.1f}",
        flush=True,
    )
    return entry


def by_formula(entry: dict[str, Any]) -> message_bytes.Sent:
    """Returns the bytes that rank 0 sends in a run by the formula; a fragment counts its share of those of all."""
    c: Configuration = entry["configuration"]
    total = message_bytes.Sent()
    if c.cocktail:
        step = cocktail_step(c.cocktail["keep"], c.cocktail["stride"])
        return total.plus(step, times=c.steps)
    if not c.outer:
        return total.plus(message_bytes.outer_step(PARAMETERS, None, 0, c.ranks, 0), times=c.steps)
    for outer in entry["outer"]:
        step = message_bytes.outer_step(PARAMETERS, c.outer["codec"], outer["sent_rank"], c.ranks, 0)
        total = total.plus(step, times=1 / c.outer.get("fragments", 1))
    return total


def telling(outer: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first and the last of a run's outer steps, and those that differ in more than the step from the one before."""
    return outer[:1] + [
        b for a, b in itertools.pairwise(outer) if b is outer[-1] or {**a, "step": 0} != {**b, "step": 0}
    ]


def curve(entry: dict[str, Any], *, every: int = POINT) -> dict[str, Any]:
    """A run as the JSON has it: rank 0's bytes and seconds, the mean loss, a point `every` few steps; `telling` outer steps."""
    ends = range(every, entry["configuration"].steps + 1, every)
    kept = {key: entry[key] for key in ("name", "validation", "formula", "ratio", "ratio_without_places")}
    return kept | {
        "outer": telling(entry["outer"]),
        "seed": entry["configuration"].seed,
        "step": list(ends),
        "bytes": [entry["bytes"][end - 1] for end in ends],
        "seconds": [round(entry["seconds"][end - 1], 2) for end in ends],
        "loss": [round(statistics.mean(entry["loss"][end - every : end]), 5) for end in ends],
    }
