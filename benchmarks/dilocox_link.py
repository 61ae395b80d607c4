"""Seconds a step of the runs of `convergence.py dilocox` in the lab; on every host `python -m dilocox_link JOB.json`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dilocox_rank
import torch
from dilocox_rank import Configuration
from linklab import Lab
from outer.measure import in_lab

DRAWN = ("all_reduce", "DiLoCo", "DiLoCo, int4 EF", "rank 16, int4 EF", "DiLoCoX", "OpenDiLoCo", "CocktailSGD")
# Inner steps that are not timed, and timed. Of outer loops: so many that the first of DiLoCoX, which wait, are over, and
# whole intervals of any.
_LOOP, _EVERY_STEP = (60, 100), (3, 10)


def step_seconds(rate: str, configurations: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """{run's name: seconds a step, of the slower of 2 hosts}.

    Args:
        rate: Of the link.
        configurations: Of the JSON; runs that it lacks are left out.

    Raises:
        LabError: A rank failed.
        LabUnavailable: There is no lab here.
    """
    found = {}
    for name in (name for name in DRAWN if name in configurations):
        first, steps = timed(configurations[name])
        job = {**configurations[name], "steps": first + steps, "only_timed": True}
        with Lab(hosts=2, rate=rate) as lab:
            ranks = in_lab(lab, "dilocox_link", job)
        found[name] = max(seconds[-1] - seconds[first - 1] for seconds in ranks) / steps
    return found


def timed(configuration: Mapping[str, Any]) -> tuple[int, int]:
    """(steps before the clock starts, steps that it runs)."""
    if not configuration["outer"]:
        return _EVERY_STEP
    first, steps = _LOOP
    return first, max(steps, configuration["outer"]["sync_every"])


def main() -> None:
    """Trains, and writes when each step ended."""
    path = Path(sys.argv[1])
    configuration = Configuration(**json.loads(path.read_text()))
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    run = dilocox_rank.train(rank, "env://", configuration=configuration)
    path.with_name(f"rank{rank}.json").write_text(json.dumps(run["seconds"]))


if __name__ == "__main__":
    main()
