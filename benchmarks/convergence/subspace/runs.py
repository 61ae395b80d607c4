"""Subspace pipelines next to the free decoder and to other boundaries of as many bytes: a byte GPT in stages, paired seeds.

The runs are those of presets.py. Stages are real processes over loopback; some runs of a seed follow one another in them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import launch
from report import Gate
from tables import Columns

from convergence.subspace import gates as subspace_gates
from convergence.subspace import rank as subspace_rank
from convergence.subspace.presets import BY_SECONDS, CLAIMS, FREE_BLOCKS, QUICK, VARIANTS, shortened
from convergence.subspace.rank import POINT, Configuration, boundary_of

TOGETHER = 4  # runs that the same processes do, and that `--runs` keeps together
ONE_SEED = ("variants", "ratios")  # parts
ALONE = ("ratios",)  # parts that run by `--only` alone, each with a record of its own
RUN_S = 1200  # deadline of one run
COLUMNS = Columns(
    "run (losses: nats a byte) 29 | seed 5 | training 10.4f | validation 12.4f | bytes a token 15.1f | "
    "times fewer 13.1f | seconds 9.1f"
)
PARTS = {"claims": CLAIMS, "variants": VARIANTS, "free_blocks": FREE_BLOCKS, "ratios": BY_SECONDS}


def measure(*, quick: bool, seeds: int, only: str = "") -> tuple[dict[str, Any], list[Gate]]:
    """Runs all PARTS but ALONE, or `only` one of them; prints a row a run.

    `quick`: a smaller decoder, fewer steps and runs. `seeds`: of the runs that gates compare; the others have one.
    """
    print(COLUMNS.heading())
    runs: dict[str, list[dict[str, Any]]] = {}
    for part, presets in PARTS.items():
        if part != only and (only or part in ALONE or (quick and part != "claims")):
            continue
        short = presets.keys() & set(QUICK) or presets.keys()
        chosen = {name: shortened(c) for name, c in presets.items() if name in short} if quick else presets
        for seed in range(1 if part in ONE_SEED else seeds):
            names = list(chosen)
            for some in (names[i : i + TOGETHER] for i in range(0, len(names), TOGETHER)):
                for name, run in zip(some, train([chosen[name] for name in some], seed), strict=True):
                    ends = (
                        run["loss"][-1],
                        run["validation"],
                        run["token_bytes"],
                        run["fewer_bytes"],
                        run["seconds"][-1],
                    )
                    print(COLUMNS.row(name, seed, *ends), flush=True)
                    runs.setdefault(name, []).append({"name": name, **run})
    return {
        "configurations": {name: dataclasses.asdict(of_name[0]["configuration"]) for name, of_name in runs.items()},
        "curves": [curve(run) for of_name in runs.values() for run in of_name],
    }, subspace_gates.gates(runs, quick=quick)


def train(configurations: Sequence[Configuration], seed: int) -> list[dict[str, Any]]:
    """Does some runs of a seed in fresh processes; what each of them measured."""
    seeded = [dataclasses.replace(c, seed=seed) for c in configurations]
    returned = launch.run(
        subspace_rank.train, ranks=seeded[0].stages, deadline_s=120 + RUN_S * len(seeded), configurations=seeded
    )
    return [summary(c, ranks) for c, *ranks in zip(seeded, *returned, strict=True)]


def summary(c: Configuration, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one run, of those that its ranks measured, in the order of their stages."""
    last = ranks[-1]
    step_tokens = c.batch * subspace_rank.CONTEXT
    steps = [(point + 1) * POINT for point in range(len(last["loss"]))]
    sent = [sum(of_point) for of_point in zip(*(rank["sent"] for rank in ranks), strict=True)]
    formula = getattr(boundary_of(c), "token_bytes", None)  # of codes that do not travel as such
    if formula is not None:
        sent = [step * step_tokens * 2 * formula * (c.stages - 1) for step in steps]
    token_bytes = sent[-1] / (steps[-1] * step_tokens * 2 * (c.stages - 1))
    return {
        "configuration": c,
        "seed": c.seed,
        "step": steps,
        "bytes": sent,
        "token_bytes": token_bytes,
        "fewer_bytes": 4 * c.width / token_bytes,
        **{name: last[name] for name in ("loss", "validation", "validations", "seconds")},
    }


def curve(run: dict[str, Any]) -> dict[str, Any]:
    """Returns a run as the JSON has it: a point every POINT steps, with bytes that all stages together have sent."""
    return {key: value for key, value in run.items() if key != "configuration"} | {
        **{key: [round(loss, 5) for loss in run[key]] for key in ("loss", "validations")},
        "seconds": [round(seconds, 2) for seconds in run["seconds"]],
    }
