"""DiLoCoX and what else talks seldom: loss against bytes, each a few real processes over loopback, paired seeds.

The runs are those of presets.py, and OpenDiLoCo and CocktailSGD compressed as much as DiLoCoX of seed 0 was.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import launch
import model
import paired
from report import Gate
from tables import Columns

import torch_lowcomm as lc
from convergence.diloco import message_bytes
from convergence.diloco import presets as diloco_presets
from convergence.diloco import rank as diloco_rank
from convergence.diloco.cocktail import codec_text
from convergence.diloco.presets import BITS, PRESETS
from convergence.diloco.rank import SHAPE, Configuration

Runs = Mapping[str, Sequence[Mapping[str, Any]]]  # by name, a seed each
QUICK = ("DiLoCo", "DiLoCo, int4 EF", "H=5 continue", "DiLoCoX")
POINT = 5  # steps to a point of a curve, which has their mean loss
ELEMENTS = sum(parameter.numel() for parameter in model.GPT(SHAPE).parameters())
# Loss / the other's, over paired seeds: (run, other, bound); without a bound it is reported.
RATIOS = (
    ("DiLoCo, int4 EF", "DiLoCo", 1.01),
    ("DiLoCo, gauss2", "DiLoCo", 1.01),
    ("H=5 continue", "H=5 sync", 1.06),
    ("DiLoCoX", "OpenDiLoCo", 1.0),
    ("DiLoCoX", "CocktailSGD", 1.0),
    ("DiLoCoX", "OpenDiLoCo, one more", None),
)
PAIRED = {name for pair in RATIOS for name in pair[:2]}
COLUMNS = Columns("run 26 | seed 5 | D 3 | loss 9.4f | outer 7 | MB 10.3f | ratio 9.1f | seconds 9.1f")


def measure(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """Runs everything; prints a row a run.

    `quick`: 80 steps, a few runs with shorter intervals, and bounds that are loose or those of arithmetic. `seeds`: of
    the runs that are compared; the others have one.
    """
    presets = {name: shortened(PRESETS[name]) for name in QUICK} if quick else PRESETS
    print(f"# {ELEMENTS} parameters\n{COLUMNS.heading()}")
    full = run("DiLoCoX", presets["DiLoCoX"])
    if not quick:
        presets = presets | equally_compressed(full)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in presets} | {"DiLoCoX": [full]}
    for seed in range(seeds):
        for name, configuration in presets.items():
            if len(runs[name]) == seed and (seed == 0 or name in PAIRED):
                runs[name].append(run(name, dataclasses.replace(configuration, seed=seed)))
    gates = [*(quick_gates if quick else loss_gates)(runs), *adaptation_gates(runs["DiLoCoX"])]
    return {
        "parameters": ELEMENTS,
        "configurations": {name: dataclasses.asdict(of_name[0]["configuration"]) for name, of_name in runs.items()},
        "curves": [curve(entry) for of_name in runs.values() for entry in of_name],
    }, gates


def measure_rates(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """The outer learning rate by the number of ranks (arXiv 2503.09799, figure 7), every 30 steps; `quick`: two ranks."""
    every = diloco_presets.presets.diloco(sync_every=30)
    of_ranks, rates = ((2,), (0.4, 0.7)) if quick else ((2, 4, 8), (0.4, 0.6, 0.7, 0.8))
    chosen = {
        f"D = {ranks}, rate {rate}": Configuration(outer=every | {"outer_lr": rate}, ranks=ranks)
        for ranks, rate in itertools.product(of_ranks, rates)
    }
    return series(chosen, quick=quick, seeds=seeds), []


def measure_bits(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """The fewest bytes at the loss of DiLoCo in float32."""
    chosen = {name: Configuration(outer=outer) for name, (outer, *_) in BITS.items()}
    content = series(chosen, quick=quick, seeds=seeds)
    return content, [] if quick else bits_gates(content["curves"])


def series(chosen: Mapping[str, Configuration], *, quick: bool, seeds: int) -> dict[str, Any]:
    """Makes some runs with every seed and prints a row a run; returns the JSON's content."""
    print(f"# {ELEMENTS} parameters\n{COLUMNS.heading()}")
    curves = []
    for seed, (name, configuration) in itertools.product(range(seeds), chosen.items()):
        seeded = dataclasses.replace(configuration, seed=seed)
        curves.append(curve(run(name, shortened(seeded) if quick else seeded)))
    return {"parameters": ELEMENTS, "curves": curves}


def bits_gates(curves: Sequence[Mapping[str, Any]]) -> list[Gate]:
    """Of BITS: loss and bytes next to DiLoCo's, from the runs as the JSON has them."""
    runs = {name: [entry for entry in curves if entry["name"] == name] for name in BITS}
    (full, exact), *others = runs.items()
    gates = []
    for name, entries in others:
        found = paired.ratio(validation, entries, exact).show(f"loss {name} / {full}")
        times = min(of_exact["bytes"][-1] / entry["bytes"][-1] for of_exact, entry in zip(exact, entries, strict=True))
        _, least, bound = BITS[name]
        gates.append(Gate(f"bytes {full} / {name}", times, ">=", least))
        if bound is not None:
            gates.append(found.gate(f"loss {name} / {full}", "<=", bound))
    return gates


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

    OpenDiLoCo sends so seldom that it cannot do so quite: it has the nearest number of outer steps, and one more.
    """
    steps = full["configuration"].steps
    nearest = max(1, round(steps / full["ratio"]))
    return {
        "OpenDiLoCo": diloco_presets.open_diloco(nearest, steps),
        "OpenDiLoCo, one more": diloco_presets.open_diloco(nearest + 1, steps),
        "CocktailSGD": diloco_presets.cocktail(keep_of(full["bytes"][-1] / steps)),
    }


def keep_of(budget: float, *, stride: int = 10) -> float:
    """The share that CocktailSGD keeps with so many bytes a step, its frames not counted."""
    low, high = 1e-4, 1.0
    for _ in range(40):
        keep = (low + high) / 2
        low, high = (keep, high) if cocktail_step(keep, stride)[0] < budget else (low, keep)
    return round(high, 6)


def cocktail_step(keep: float, stride: int) -> message_bytes.Sent:
    """Returns the bytes of a step of CocktailSGD by the formula, for the first of two ranks."""
    return message_bytes.all_reduce([math.ceil(ELEMENTS / stride)], lc.codec(codec_text(keep)), 2, 0)


def run(name: str, configuration: Configuration) -> dict[str, Any]:
    """Runs one configuration in fresh processes and prints its row (bytes: rank 0's)."""
    c = configuration
    ranks = launch.run(diloco_rank.train, ranks=c.ranks, deadline_s=120 + 2.0 * c.steps, configuration=c)
    entry = {"name": name, "configuration": c, **ranks[0]}
    sent = entry["bytes"][-1]
    entry["ratio"] = 2 * ELEMENTS * c.steps / sent
    loss, seconds = entry["validation"], entry["seconds"][-1]
    print(
        COLUMNS.row(name, c.seed, c.ranks, loss, len(entry["outer"]), sent / 1e6, entry["ratio"], seconds), flush=True
    )
    return entry


def validation(entry: Mapping[str, Any]) -> float:
    """Of the outer parameters."""
    return float(entry["validation"])


def loss_gates(runs: Runs) -> list[Gate]:
    """Of RATIOS, and of three ranks next to two."""
    gates = []
    for name, other, bound in RATIOS:
        found = paired.ratio(validation, runs[name], runs[other]).show(f"loss {name} / {other}")
        if bound is not None:
            gates.append(found.gate(f"loss {name} / {other}", "<", bound))
    three = validation(runs["DiLoCoX, D=3"][0]) / validation(runs["DiLoCoX"][0])
    return [*gates, Gate("loss DiLoCoX of 3 ranks / of 2", three, "<", 1.02)]


def quick_gates(runs: Runs) -> list[Gate]:
    """Contrasts that 80 steps show."""
    first = {name: entries[0] for name, entries in runs.items()}
    int4 = validation(first["DiLoCo, int4 EF"]) / validation(first["DiLoCo"])
    ratios = [first[name]["ratio"] for name in ("DiLoCoX", "DiLoCo, int4 EF", "DiLoCo")]
    return [
        Gate("loss DiLoCo, int4 EF / DiLoCo, loose", int4, "<", 1.03),
        Gate(
            "largest loss (of a model that has learned nothing: 4.85)", max(map(validation, first.values())), "<", 3.2
        ),
        Gate("bytes, DiLoCo / with int4 EF", ratios[1] / ratios[2], ">", 7.0),
        Gate("bytes, with int4 EF / DiLoCoX", ratios[0] / ratios[1], ">", 3.0),
    ]


def adaptation_gates(entries: Sequence[Mapping[str, Any]]) -> list[Gate]:
    """r_t has fallen, and H_t is what r_t says, over all seeds."""
    last = [entry["outer"][-1]["rank"] / entry["outer"][0]["rank"] for entry in entries]
    wrong = 0
    for entry in entries:
        rank, every = (entry["configuration"].outer[name] for name in ("rank", "sync_every"))
        wrong += sum(
            outer["sync_every"] != max(every // 4, math.floor(every * outer["rank"] / rank + 0.5))
            for outer in entry["outer"]
        )
    return [
        Gate("DiLoCoX: last r_t / r_1, mean", statistics.mean(last), "<", 1.0),
        Gate("DiLoCoX: outer steps in which H_t is not max(H_1 / 4, round(H_1 r_t / r_1))", wrong, "==", 0),
    ]


def telling(outer: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first and the last of a run's outer steps, and those that differ in more than the step from the one before."""
    return outer[:1] + [
        b for a, b in itertools.pairwise(outer) if b is outer[-1] or {**a, "step": 0} != {**b, "step": 0}
    ]


def curve(entry: dict[str, Any]) -> dict[str, Any]:
    """A run as the JSON has it: rank 0's bytes and seconds, the mean loss, a point every POINT steps; `telling` outer steps."""
    ends = range(POINT, entry["configuration"].steps + 1, POINT)
    return {key: entry[key] for key in ("name", "validation", "ratio")} | {
        "outer": telling(entry["outer"]),
        "seed": entry["configuration"].seed,
        "step": list(ends),
        "bytes": [entry["bytes"][end - 1] for end in ends],
        "seconds": [round(entry["seconds"][end - 1], 2) for end in ends],
        "loss": [round(statistics.mean(entry["loss"][end - POINT : end]), 5) for end in ends],
    }
