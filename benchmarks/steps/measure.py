"""Runs the ranks in a lab and makes rows of what they measured."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from linklab import Lab
from linklab.job import run_on_hosts

from steps.cases import Case


@dataclasses.dataclass(frozen=True)
class Row:
    """One case on one link: medians over repetitions, of each of which the slowest rank counts.

    `sent` is what an interface sent a step, headers included. `ratio` is how many times fewer bytes that is than the
    first case's, `speedup` how many times faster than the first case's the step is. `bound` is how many times faster than
    the base's a step could be: (comp + comm) / (comp + comm · sent / base's sent), with comm what the base's step takes
    beyond computing. `share` is (base's seconds / seconds) / bound.
    """

    name: str
    rate: str
    peer: bool
    seconds: float
    least_s: float
    most_s: float
    sent: int
    ratio: float
    bound: float
    speedup: float
    share: float


def measure(
    method: str, cases: list[Case], *, rate: str, model: str, batch: int, repetitions: int
) -> tuple[float, list[Row]]:
    """Seconds of computing, and a row a case. LabError when a rank fails."""
    with Lab(hosts=2, rate=rate) as lab:
        job = {
            "method": method,
            "cases": [dataclasses.asdict(case) for case in cases],
            "model": model,
            "batch": batch,
            "repetitions": repetitions,
        }
        ranks = run_on_hosts(lab, "steps.rank", job, env={"LOWCOMM_MIN_BYTES": "65536"})
    return rows_of(cases, rate, ranks)


def rows_of(cases: list[Case], rate: str, ranks: list[list[dict[str, Any]]]) -> tuple[float, list[Row]]:
    """Makes the return value of `measure` from the ranks' results: the model by itself first, then the cases."""
    slowest = [
        [max(times) for times in zip(*(row["seconds"] for row in way), strict=True)] for way in zip(*ranks, strict=True)
    ]
    sent = [max(int(statistics.median(row["sent"])) for row in way) for way in zip(*ranks, strict=True)][1:]
    comp, *seconds = [statistics.median(times) for times in slowest]
    base = next((i for i, case in enumerate(cases) if case.base), 0)
    comm = max(seconds[base] - comp, 0.0)
    rows = []
    for i, case in enumerate(cases):
        bound = (comp + comm) / (comp + comm * sent[i] / sent[base])
        times = slowest[i + 1]
        rows.append(
            Row(
                name=case.name,
                rate=rate,
                peer=case.peer,
                seconds=seconds[i],
                least_s=min(times),
                most_s=max(times),
                sent=sent[i],
                ratio=sent[0] / sent[i],
                bound=bound,
                speedup=seconds[0] / seconds[i],
                share=seconds[base] / seconds[i] / bound,
            )
        )
    return comp, rows
