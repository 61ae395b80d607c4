"""Runs the ranks in a lab and makes rows of what they measured."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable
from typing import Any

from linklab import Lab
from linklab.job import run_on_hosts

from diloco.cases import ALONE, Case
from diloco.message import link_seconds, payload_bytes


@dataclasses.dataclass(frozen=True)
class Row:
    """One case on one link; a round is H inner steps with their outer step, of all fragments.

    Medians over the timed rounds of all repetitions, of each of which the slowest rank counts, but those named here.
    `speed`: tokens a second of all ranks. `shares`: of the tokens a second without communication, in its turns just before
    and after, one a repetition; `share`: their median. `sent`: bytes that an interface sent a round, headers included;
    `payload`, `wire`: mean over ranks of the codes by the format, and of what the library counted, frame headers included
    (0: no count). `message_s`: `sent` at the link's rate.
    `fits`: whether that is less than the inner steps that it may take (None where training stands still for it).
    `waited_s`, `local_s`: of the training thread a round, for the network, and else after the inner optimizer.
    `exposed_s`: the waiting of the rank that waited least in each step, which the others were not late for.
    `coding_s`: encoding and decoding on the worker a round. `others_cpu_s`: processor time of all other threads a
    round. `loss`: of the outer parameters at the end, mean over repetitions.
    """

    name: str
    rate: str
    step_s: float
    speed: float
    share: float
    shares: list[float]
    sent: float
    wire: float
    payload: float
    message_s: float
    fits: bool | None
    waited_s: float
    exposed_s: float
    local_s: float
    coding_s: float
    others_cpu_s: float
    loss: float

    @property
    def local_share(self) -> float:
        """The outer step's own work by 100 inner steps."""
        return (self.local_s + self.coding_s) / (100 * self.step_s)


def measure(
    cases: list[Case], *, rate: str, model: str, batch: int, every: int, rounds: int, repetitions: int, hosts: int = 2
) -> list[Row]:
    """A row a case; the one without communication may have several turns a repetition. LabError when a rank fails."""
    with Lab(hosts=hosts, rate=rate) as lab:
        job = job_of(lab, cases, model=model, batch=batch, every=every, rounds=rounds, repetitions=repetitions)
        ranks, bits = run_on_hosts(lab, "diloco.rank", job), lab.links[0].up_bits
    return rows_of(cases, job, rate, bits, ranks)


def job_of(lab: Lab, cases: list[Case], **options: Any) -> dict[str, Any]:
    """The job that diloco.rank reads."""
    addresses = [lab.address(host) for host in range(lab.hosts)]
    return {"cases": [dataclasses.asdict(case) for case in cases], "addresses": addresses, **options}


def exposed(waits: Iterable[list[float]]) -> float:
    """Of ranks' seconds of waiting by inner step those of the rank that waited least, over all steps."""
    return sum(min(of_ranks) for of_ranks in zip(*waits, strict=True))


def _of_rounds(runs: list[Any], name: str, of: Any = max) -> list[float]:
    """Of every timed round of every repetition one of the ranks' numbers, the largest; `runs` by repetition, then rank."""
    return [
        of(side[name] for side in sides) for ranks in runs for sides in zip(*(r["rounds"] for r in ranks), strict=True)
    ]


def shares_of(alone: list[bool], seconds: list[list[float]]) -> list[list[float]]:
    """Of every turn's seconds the part that the turns without communication nearest before and after it took, their mean.

    Args:
        alone: Of each place in the order of turns, whether it is without communication; the first is.
        seconds: By place, then repetition.
    """
    turns = [(place, repetition) for repetition in range(len(seconds[0])) for place in range(len(alone))]
    at = [i for i, (place, _) in enumerate(turns) if alone[place]]
    shares: list[list[float]] = [[] for _ in alone]
    for i, (place, repetition) in enumerate(turns):
        near = {max(j for j in at if j <= i), min((j for j in at if j >= i), default=at[-1])}
        base = statistics.mean(seconds[turns[j][0]][turns[j][1]] for j in near)
        shares[place].append(base / seconds[place][repetition])
    return shares


def rows_of(cases: list[Case], job: dict[str, Any], rate: str, bits: float | None, ranks: list[Any]) -> list[Row]:
    """Of what the ranks wrote: by turn of a repetition, then repetition."""
    shapes, world = ranks[0]["shapes"], len(ranks)
    by_place = [list(zip(*(rank["runs"][i] for rank in ranks), strict=True)) for i in range(len(cases))]
    seconds = [[statistics.median(_of_rounds([run], "s")) for run in runs] for runs in by_place]
    shares = shares_of([case.name == ALONE for case in cases], seconds)
    places = {case: [i for i, other in enumerate(cases) if other == case] for case in cases}
    tokens = world * job["batch"] * ranks[0]["context"] * job["every"]
    alone = next(at for case, at in places.items() if case.name == ALONE)
    step_s = statistics.median(_of_rounds([run for i in alone for run in by_place[i]], "s")) / job["every"]
    rows = []
    for case, at in places.items():
        runs = [run for i in at for run in by_place[i]]
        all_ranks = [side for run in runs for side in run]

        def most(name: str, of: Any = max, runs: list[Any] = runs) -> float:
            return statistics.median(of(side[name] for side in run) for run in runs)

        sent = most("sent")
        message_s = link_seconds(sent, bits)
        free_s = (case.delay or job["every"]) * case.fragments * step_s
        of_case = [share for i in at for share in shares[i]]
        rows.append(
            Row(
                name=case.name,
                rate=rate,
                step_s=step_s,
                speed=tokens / statistics.median(_of_rounds(runs, "s")),
                share=statistics.median(of_case),
                shares=of_case,
                sent=sent,
                wire=most("wire_bytes", statistics.mean),
                payload=payload_bytes(case, shapes, world) if case.ours else 0,
                message_s=message_s,
                fits=None if case.blocking else message_s < free_s,
                waited_s=statistics.median(_of_rounds(runs, "waited_s")),
                exposed_s=statistics.median(_of_rounds(runs, "waits", exposed)),
                local_s=statistics.median(_of_rounds(runs, "local_s")),
                coding_s=most("coding_s"),
                others_cpu_s=most("others_cpu_s"),
                loss=statistics.mean(side["loss"] for side in all_ranks),
            )
        )
    return rows
