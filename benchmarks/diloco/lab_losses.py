"""The losses of `diloco_lab`: every case trained for longer, from several seeds, on hosts whose links have no rate.

A link's rate changes no loss: an average is applied after a fixed number of steps, whenever it came.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from linklab import Lab
from linklab.job import run_on_hosts

from diloco.cases import Case
from diloco.lab_cases import Setting
from diloco.measure import job_of


def of_case(case: Case, setting: Setting, sites: int) -> list[float]:
    """Losses in nats a byte of the outer parameters after all rounds, one a seed, mean over ranks. LabError when one fails."""
    with Lab(hosts=sites) as lab:
        job = job_of(
            lab,
            [case],
            model=setting.model,
            batch=setting.batch,
            every=setting.every,
            rounds=setting.rounds_of_losses,
            seeds=list(range(setting.seeds)),
        )
        ranks = run_on_hosts(lab, "diloco.rank", job)
    return [
        statistics.mean(run["loss"] for run in of_ranks)
        for of_ranks in zip(*(r["runs"][0] for r in ranks), strict=True)
    ]


def ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """The mean over seeds of a case's loss by another's, and its standard error, 0 of a single seed."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    error = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else 0.0
    return {"loss_by_peer": statistics.mean(ratios), "loss_error": error}


def to_json(losses: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A row a case, as the JSON has it."""
    return [{"name": name, "loss": statistics.mean(found), "losses": found} for name, found in losses.items()]
