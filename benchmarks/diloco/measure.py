"""Runs the ranks in a lab and makes rows of what they measured."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from linklab import Lab
from linklab.job import run_on_hosts

from diloco.cases import ALONE, Case
from diloco.message import link_seconds, payload_bytes


@dataclasses.dataclass(frozen=True)
class Row:
    """One case on one link; a round is H inner steps with their outer step, of all fragments.

    Medians over the timed rounds of all repetitions, of each of which the slower rank counts, but `share` and `loss`.
    `speed`: tokens a second of both ranks. `share`: of the same repetition's tokens a second without communication,
    median over repetitions. `sent`: bytes that an interface sent a round, headers included; `payload`: codes by the
    format; `wire`: what the library counted, frame headers included (0: no count). `message_s`: `sent` at the link's rate.
    `fits`: whether that is less than the inner steps that it may take (None where training stands still for it).
    `waited_s`, `local_s`: of the training thread a round, for the network, and else after the inner optimizer.
    `coding_s`: encoding and decoding on the worker a round. `others_cpu_s`: processor time of all other threads a
    round. `loss`: of the outer parameters at the end, mean over repetitions.
    """

    name: str
    rate: str
    step_s: float
    speed: float
    share: float
    sent: float
    wire: float
    payload: int
    message_s: float
    fits: bool | None
    waited_s: float
    local_s: float
    coding_s: float
    others_cpu_s: float
    loss: float

    @property
    def local_share(self) -> float:
        """The outer step's own work by 100 inner steps."""
        return (self.local_s + self.coding_s) / (100 * self.step_s)


def measure(
    cases: list[Case], *, rate: str, model: str, batch: int, every: int, rounds: int, repetitions: int
) -> list[Row]:
    """A row a case. LabError when a rank fails."""
    with Lab(hosts=2, rate=rate) as lab:
        job = {
            "cases": [dataclasses.asdict(case) for case in cases],
            "addresses": [lab.address(host) for host in range(lab.hosts)],
            "model": model,
            "batch": batch,
            "every": every,
            "rounds": rounds,
            "repetitions": repetitions,
        }
        ranks, bits = run_on_hosts(lab, "diloco.rank", job), lab.links[0].up_bits
    return rows_of(cases, job, rate, bits, ranks)


def _slower(runs: list[list[dict[str, Any]]], name: str) -> list[float]:
    """Of every timed round of every repetition the larger of two ranks' numbers; `runs` by repetition, then rank."""
    return [
        max(side[name] for side in sides) for ranks in runs for sides in zip(*(r["rounds"] for r in ranks), strict=True)
    ]


def rows_of(cases: list[Case], job: dict[str, Any], rate: str, bits: float | None, ranks: list[Any]) -> list[Row]:
    """Of what the ranks wrote: by repetition, case."""
    shapes = ranks[0]["shapes"]
    by_case = [list(zip(*(rank["runs"][i] for rank in ranks), strict=True)) for i in range(len(cases))]
    alone = by_case[[case.name for case in cases].index(ALONE)]
    alone_s = [statistics.median(_slower([run], "s")) for run in alone]
    tokens = len(ranks) * job["batch"] * ranks[0]["context"] * job["every"]
    step_s = statistics.median(_slower(alone, "s")) / job["every"]
    rows = []
    for case, runs in zip(cases, by_case, strict=True):
        both = [side for run in runs for side in run]

        def most(name: str, runs: list[Any] = runs) -> float:
            return statistics.median(max(side[name] for side in run) for run in runs)

        round_s = [statistics.median(_slower([run], "s")) for run in runs]
        sent = most("sent")
        message_s = link_seconds(sent, bits)
        free_s = (case.delay or job["every"]) * case.fragments * step_s
        rows.append(
            Row(
                name=case.name,
                rate=rate,
                step_s=step_s,
                speed=tokens / statistics.median(_slower(runs, "s")),
                share=statistics.median(a / b for a, b in zip(alone_s, round_s, strict=True)),
                sent=sent,
                wire=most("wire_bytes"),
                payload=payload_bytes(case, shapes) if case.ours else 0,
                message_s=message_s,
                fits=None if case.blocking else message_s < free_s,
                waited_s=statistics.median(_slower(runs, "waited_s")),
                local_s=statistics.median(_slower(runs, "local_s")),
                coding_s=most("coding_s"),
                others_cpu_s=most("others_cpu_s"),
                loss=statistics.mean(side["loss"] for side in both),
            )
        )
    return rows
