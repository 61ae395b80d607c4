"""The DDP hook's claims: 4 bits, or coded factors of a low rank, against exact DDP and torch's PowerSGD, paired seeds.

Runs, each a pair of processes over loopback, equal in seed, data and steps: exact; `sym4` and `gauss4` with error
feedback; rank 4 with factors in `sym4`, with the first of them in `sym8`, and with both in `sym8`; torch's PowerSGD hook of
rank 4, whose factors are float32. The last four begin with the same exact steps.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

import launch
from report import Gate
from tables import Columns

from convergence.ddp import rank as ddp_rank
from convergence.ddp.rank import Configuration

RANKS = 2
WARM_UP = 2  # the fewest that PowerSGD's hook takes
_FACTORS: dict[str, Any] = {"factor_rank": 4, "warm_up_steps": WARM_UP}
CONFIGURATIONS = {
    "exact": Configuration(),
    "sym4": Configuration(codec="sym4:bucket=128"),
    "gauss4": Configuration(codec="gauss4:gain=1.011"),
    "rank 4, sym4": Configuration(codec="sym4:bucket=128", **_FACTORS),
    "rank 4, sym8/sym4": Configuration(codec="sym4:bucket=128", projection_codec="sym8:bucket=128", **_FACTORS),
    "rank 4, sym8": Configuration(codec="sym8:bucket=128", **_FACTORS),
    "PowerSGD rank 4": Configuration(**_FACTORS),
}
LOW_RANK = ("rank 4, sym4", "rank 4, sym8/sym4", "rank 4, sym8")
COLUMNS = Columns("run 20 | seed 6 | steps 7 | perplexity 12.4f | MB 10.2f | KB a step 11.1f | seconds 9.1f")


def measure(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """Runs everything; prints a row a run. `quick`: 16 steps, and a loose bound on the differences of loss."""
    size = {"steps": 16} if quick else {}
    print(COLUMNS.heading())
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CONFIGURATIONS}
    for seed in range(seeds):
        for name, configuration in CONFIGURATIONS.items():
            runs[name].append(run(name, dataclasses.replace(configuration, seed=seed, **size)))
    pairs = [("sym4", "exact"), ("gauss4", "exact"), *((name, "PowerSGD rank 4") for name in LOW_RANK)]
    gates = [loss_gate(runs, name, peer, quick=quick) for name, peer in pairs]
    for exact, name, bound in (*(("PowerSGD rank 4", name, 3.0) for name in LOW_RANK), ("exact", "sym4", 7.0)):
        fewer = a_step(runs[exact][0]) / a_step(runs[name][0])
        gates.append(Gate(f"bytes a step, {exact} / {name}", fewer, ">=", bound))
    return {
        "ranks": RANKS,
        "configurations": {name: dataclasses.asdict(entries[0]["configuration"]) for name, entries in runs.items()},
        "curves": [curve(entry) for entries in runs.values() for entry in entries],
    }, gates


def run(name: str, configuration: Configuration) -> dict[str, Any]:
    """Runs one configuration in fresh processes and prints its row (bytes: rank 0's)."""
    c = configuration
    ranks = launch.run(ddp_rank.train, ranks=RANKS, deadline_s=60 + 2.0 * c.steps, world=RANKS, configuration=c)
    entry = {"name": name, "configuration": c, **ranks[0]}
    sent = entry["bytes"][-1] / 1e6, a_step(entry) / 1e3
    print(COLUMNS.row(name, c.seed, c.steps, entry["perplexity"], *sent, entry["seconds"][-1]), flush=True)
    return entry


def a_step(entry: dict[str, Any]) -> float:
    """Bytes of a step after the warm-up."""
    sent = entry["bytes"]
    return (sent[-1] - sent[WARM_UP]) / (len(sent) - WARM_UP - 1)


def loss_gate(runs: dict[str, list[dict[str, Any]]], name: str, peer: str, *, quick: bool) -> Gate:
    """How much larger the validation loss is than the peer's, over paired seeds; its bound is one standard error."""
    differences = [math.log(a["perplexity"] / b["perplexity"]) for a, b in zip(runs[name], runs[peer], strict=True)]
    mean = statistics.mean(differences)
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
    print(f"# loss, {name} - {peer}: mean {mean:+.4f}, standard error {error:.4f}")
    if quick:
        return Gate(f"loss, {name} - {peer}, loose", mean, "<=", 0.15)
    return Gate(f"loss, {name} - {peer}, bound one standard error", mean, "<=", error)


def curve(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns a run as the JSON has it: rank 0's bytes and seconds, the mean loss, a point a step; `bytes_a_step` as a_step()."""
    kept = {key: entry[key] for key in ("name", "perplexity", "bytes", "seconds", "loss")}
    steps = list(range(1, len(entry["bytes"]) + 1))
    return kept | {"seed": entry["configuration"].seed, "step": steps, "bytes_a_step": a_step(entry)}
