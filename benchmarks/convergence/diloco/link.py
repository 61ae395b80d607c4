"""Seconds a step of the runs of `convergence diloco` in the lab; on every host `python -m convergence.diloco.link JOB.json`."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping
from typing import Any

import torch
from linklab import Lab
from linklab.job import job_of_host, run_on_hosts

from convergence.diloco import rank as diloco_rank
from convergence.diloco.rank import Configuration

DRAWN = ("all_reduce", "DiLoCo", "DiLoCo, int4 EF", "rank 16, int4 EF", "DiLoCoX", "OpenDiLoCo", "CocktailSGD")
_LOOP_STEPS = 60, 100  # before the clock starts, so many that the first of DiLoCoX, which wait, are over; timed
_EACH_STEPS = 3, 10  # the same of runs that talk every step


def step_seconds(rate: str, configurations: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """{run's name: seconds a step} on 2 hosts: the median of several intervals, each of the host that was slower in it.

    Args:
        rate: Of the link.
        configurations: Of the JSON; runs that it lacks are left out.

    Raises:
        LabError: A rank failed.
        LabUnavailable: There is no lab here.
    """
    found = {}
    for name in (name for name in DRAWN if name in configurations):
        first, every, intervals = timed(configurations[name])
        job = {**configurations[name], "steps": first + every * intervals, "only_timed": True}
        with Lab(hosts=2, rate=rate) as lab:
            ranks = run_on_hosts(lab, "convergence.diloco.link", job)
        found[name] = seconds_of(ranks, first, every)
    return found


def timed(configuration: Mapping[str, Any]) -> tuple[int, int, int]:
    """(steps before the clock starts, steps of an interval, intervals that are timed)."""
    if not configuration["outer"]:
        first, steps = _EACH_STEPS
        return first, 1, steps
    (first, steps), every = _LOOP_STEPS, configuration["outer"]["sync_every"]
    return first, every, max(1, steps // every)


def seconds_of(ranks: list[list[float]], first: int, every: int) -> float:
    """Of when each step ended on every rank."""
    ends = range(first - 1, len(ranks[0]), every)
    slower = [max(seconds[end] - seconds[end - every] for seconds in ranks) for end in ends[1:]]
    return statistics.median(slower) / every


def main() -> None:
    """Trains, and writes when each step ended."""
    job, finish = job_of_host()
    torch.set_num_threads(1)
    run = diloco_rank.train(int(os.environ["RANK"]), "env://", configuration=Configuration(**job))
    finish(run["seconds"])


if __name__ == "__main__":
    main()
