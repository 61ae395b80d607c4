"""AQ-SGD next to exact messages and to DirectQ: a byte GPT in stages, each a real process over loopback, paired seeds.

The runs are those of presets.py, and of `convergence aq_replicas` those of replicas.py. Some runs of a seed follow one another
in the same processes.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import launch
from report import Gate
from tables import Columns

from convergence.pipeline import gates as pipeline_gates
from convergence.pipeline import rank as pipeline_rank
from convergence.pipeline.presets import CLAIMS, FINE_TUNING, FRESH, QUICK, WIDE, shortened
from convergence.pipeline.rank import KINDS, Configuration

Runs = dict[str, list[dict[str, Any]]]  # by name, a seed each
TOGETHER = 4  # runs that the same processes do, and that `--runs` keeps together
ALONE = ("fine_tuning", "fresh", "wide")  # parts that run by `--only` alone, each with a record of its own
RUN_S = 400  # deadline of one run
PARTS = {
    "claims": CLAIMS,
    "fine_tuning": FINE_TUNING,
    "fresh": FRESH,
    "wide": WIDE,
}
# The curves of the picture.
DRAWN = ("exact", "DirectQ gauss2/gauss4", "AQ gauss2/gauss4", "AQ gauss1/gauss4")
COLUMNS = Columns(
    "run (losses: nats a byte) 45 | seed 5 | training 10.4f | samples 10.4f | validation 12.4f | "
    "bits forward 14.3f | backward 10.3f | a parameter 13.3f | MB sent 10.1f | coded 9.4f | "
    "|a-m|/|a| 11.3f | seconds 9.1f"
)


def measure(*, quick: bool, seeds: int, only: str = "") -> tuple[dict[str, Any], list[Gate]]:
    """Runs all PARTS but ALONE, or `only` one of them; prints a row a run.

    `quick`: fewer samples, epochs and runs, and bounds that so few steps reach; the part `claims` alone unless `only`
    is.
    """
    print(COLUMNS.heading())
    runs: Runs = {}
    for part, presets in PARTS.items():
        if part != only and (only or part in ALONE or (quick and part != "claims")):
            continue
        if quick:
            presets = {name: shortened(c) for name, c in presets.items() if name in QUICK or part != "claims"}
        for run in of_presets(presets, range(seeds)):
            runs.setdefault(run["name"], []).append(run)
    return to_json(runs), pipeline_gates.gates(runs, quick=quick)


def of_presets(presets: Mapping[str, Configuration], seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Prints and yields all runs: seeds after one another, in fresh processes every few runs."""
    for seed in seeds:
        by_stages: dict[int, list[str]] = {}
        for name, c in presets.items():
            by_stages.setdefault(c.stages, []).append(name)
        for names in by_stages.values():
            for some in (names[i : i + TOGETHER] for i in range(0, len(names), TOGETHER)):
                configurations = [dataclasses.replace(presets[name], seed=seed) for name in some]
                returned = launch.run(
                    pipeline_rank.train,
                    ranks=configurations[0].replicas * configurations[0].stages,
                    deadline_s=240 + RUN_S * len(some),
                    configurations=configurations,
                )
                for name, c, *ranks in zip(some, configurations, *returned, strict=True):
                    run = {"name": name, "seed": seed, **summary(c, ranks)}
                    print(row(run), flush=True)
                    yield run


def summary(c: Configuration, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the ranks of one run measured, in the order of their stages, replica after replica; bits are of all boundaries."""
    replicas = [ranks[i : i + c.stages] for i in range(0, len(ranks), c.stages)]
    lasts = [stages[-1] for stages in replicas]
    sent = [[rank["sent"][point] for rank in ranks] for point in range(len(ranks[0]["sent"]))]
    total = {kind: sum(rank[kind] for point in sent for rank in point) for kind in (*KINDS, "exact")}
    values = sum(total[kind] for kind in KINDS if kind != "announcements")
    steps = c.epochs * c.epoch_steps
    bits = 8 / (ranks[0]["elements"] * c.replicas * (c.stages - 1))
    return {
        "configuration": c,
        **{name: lasts[0][name] for name in ("samples", "validation", "validations", "seconds")},
        "loss": [statistics.mean(of_point) for of_point in zip(*(last["loss"] for last in lasts), strict=True)],
        "bytes": list(itertools.accumulate(sum(rank[kind] for rank in point for kind in KINDS) for point in sent)),
        **{f"{kind}_bits": total[kind] * bits for kind in ("forward", "backward", "announcements")},
        "replicas_bits": total["replicas"] * 8 / (c.replicas * steps * sum(rank["parameters"] for rank in replicas[0])),
        "coded": 1 - total["exact"] / values,
        "changes": [changes(point) for point in sent],
        "cache_bytes": sum(rank["cache_bytes"] for rank in ranks),
        "boundaries_that_differ": sum(
            a["caches"].get("sent") != b["caches"].get("received")
            for stages in replicas
            for a, b in itertools.pairwise(stages)
        ),
    }


def changes(ranks: Sequence[Mapping[str, float]]) -> float | None:
    """|a - m| / |a| over all boundaries, from the means of each; None where nothing travelled as a change."""
    values, sizes = (sum(rank.get(name, 0.0) for rank in ranks) for name in ("mean_value", "mean_change"))
    return sizes / values if values else None


def row(run: Mapping[str, Any]) -> str:
    """The row of a run."""
    cells = [run[name] for name in ("samples", "validation", "forward_bits", "backward_bits", "replicas_bits")]
    ends = run["coded"], run["changes"][-1], run["seconds"][-1]
    return COLUMNS.row(run["name"], run["seed"], run["loss"][-1], *cells, run["bytes"][-1] / 1e6, *ends)


def to_json(runs: Runs) -> dict[str, Any]:
    """Returns runs as the JSON has them."""
    return {
        "configurations": {name: dataclasses.asdict(of_name[0]["configuration"]) for name, of_name in runs.items()},
        "curves": [curve(run) for of_name in runs.values() for run in of_name],
    }


def curve(run: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a run as the JSON has it: a point an epoch or c.point steps, with bytes that all stages together have sent."""
    c, left_out = run["configuration"], ("configuration", "loss", "validations", "seconds", "changes")
    return {key: value for key, value in run.items() if key not in left_out} | {
        "step": [(c.point or c.epoch_steps) * (i + 1) for i in range(len(run["loss"]))],
        **{key: [round(loss, 5) for loss in run[key]] for key in ("loss", "validations")},
        "seconds": [round(seconds, 2) for seconds in run["seconds"]],
        "changes": [None if ratio is None else round(ratio, 5) for ratio in run["changes"]],
    }
