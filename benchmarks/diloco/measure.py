"""Runs the ranks in a lab, makes rows of what they measured, and losses of longer trainings."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable
from typing import Any

from linklab import Lab
from linklab.job import run_on_hosts
from linklab.link import goodput_bits

from diloco.cases import ALONE, Case, Setting

_ROUNDS = 2  # of a turn; the first sends the message that travels in the second


@dataclasses.dataclass(frozen=True)
class Row:
    """One case on one link; a round is H inner steps with their outer step, of all fragments.

    Medians over the timed rounds of all repetitions, of each of which the slowest rank counts, but those named here.
    `speed`: tokens a second of all ranks. `shares`: of the tokens a second without communication, in its turns just before
    and after, one a repetition; `share`: their median. `sent`: bytes that an interface sent a round, headers included;
    `message_s`: that at the link's rate. `fits`: whether that is less than the inner steps that it may take (None where
    training stands still for it). `waited_s`, `local_s`: of the training thread a round, for the network, and else after the
    inner optimizer. `exposed_s`: the waiting of the rank that waited least in each step, which the others were not late for.
    `coding_s`: encoding and decoding on the worker a round.
    """

    name: str
    rate: str
    ours: bool
    step_s: float
    speed: float
    share: float
    shares: list[float]
    sent: float
    message_s: float
    fits: bool | None
    waited_s: float
    exposed_s: float
    local_s: float
    coding_s: float

    @property
    def own(self) -> float:
        """The outer step's own work by 100 inner steps."""
        return (self.local_s + self.coding_s) / (100 * self.step_s)


def job_of(lab: Lab, cases: list[Case], setting: Setting, **options: Any) -> dict[str, Any]:
    """The job that diloco.rank reads."""
    addresses = [lab.address(host) for host in range(lab.hosts)]
    same = {name: getattr(setting, name) for name in ("model", "batch", "every")}
    return {"cases": [dataclasses.asdict(case) for case in cases], "addresses": addresses, **same, **options}


def measure(setting: Setting, *, sites: int, rate: str, peer: bool) -> list[Row]:
    """A row a case; the one without communication has several turns a repetition. LabError when a rank fails."""
    cases = setting.turns(peer=peer)
    with Lab(hosts=sites, rate=rate) as lab:
        job = job_of(lab, cases, setting, rounds=_ROUNDS, seeds=[0] * setting.repetitions)
        ranks, bits = run_on_hosts(lab, "diloco.rank", job), lab.links[0].up_bits
    return rows_of(cases, setting, rate, bits, ranks)


def losses(case: Case, setting: Setting, sites: int) -> list[float]:
    """Losses in nats a byte of the outer parameters after all rounds, one a seed, mean over ranks. LabError when one fails.

    The links have no rate, which changes no loss: an average is applied after a fixed number of steps, whenever it came.
    """
    with Lab(hosts=sites) as lab:
        job = job_of(lab, [case], setting, rounds=setting.rounds_of_losses, seeds=list(range(setting.seeds)))
        ranks = run_on_hosts(lab, "diloco.rank", job)
    runs = zip(*(rank["runs"][0] for rank in ranks), strict=True)
    return [statistics.mean(run["loss"] for run in of_ranks) for of_ranks in runs]


def exposed(waits: Iterable[list[float]]) -> float:
    """Of ranks' seconds of waiting by inner step those of the rank that waited least, over all steps."""
    return sum(min(of_ranks) for of_ranks in zip(*waits, strict=True))


def _of_rounds(runs: list[Any], name: str, of: Any = max) -> list[float]:
    """Of every timed round of every repetition one of the ranks' numbers, the largest; `runs` by repetition, then rank."""
    return [
        of(side[name] for side in sides) for ranks in runs for sides in zip(*(r["rounds"] for r in ranks), strict=True)
    ]


def shares_of(alone: list[bool], seconds: list[list[float]]) -> list[list[float]]:
    """Of every turn's seconds, by place and repetition, the part that the turns without communication nearest before and after
    it took, their mean. `alone` has of each place whether it is without communication; the first is.
    """
    turns = [(place, repetition) for repetition in range(len(seconds[0])) for place in range(len(alone))]
    at = [i for i, (place, _) in enumerate(turns) if alone[place]]
    shares: list[list[float]] = [[] for _ in alone]
    for i, (place, repetition) in enumerate(turns):
        near = {max(j for j in at if j <= i), min((j for j in at if j >= i), default=at[-1])}
        base = statistics.mean(seconds[turns[j][0]][turns[j][1]] for j in near)
        shares[place].append(base / seconds[place][repetition])
    return shares


def rows_of(cases: list[Case], setting: Setting, rate: str, bits: float | None, ranks: list[Any]) -> list[Row]:
    """Of what the ranks wrote: by turn of a repetition, then repetition."""
    by_place = [list(zip(*(rank["runs"][i] for rank in ranks), strict=True)) for i in range(len(cases))]
    seconds = [[statistics.median(_of_rounds([run], "s")) for run in runs] for runs in by_place]
    shares = shares_of([case == ALONE for case in cases], seconds)
    places = {case: [i for i, other in enumerate(cases) if other == case] for case in cases}
    tokens = len(ranks) * setting.batch * ranks[0]["context"] * setting.every
    step_s = statistics.median(_of_rounds([run for i in places[ALONE] for run in by_place[i]], "s")) / setting.every
    rows = []
    for case, at in places.items():
        runs = [run for i in at for run in by_place[i]]
        sent, coding_s = (statistics.median(max(r[name] for r in run) for run in runs) for name in ("sent", "coding_s"))
        message_s = sent * 8 / goodput_bits(bits) if bits else 0.0
        of_case = [share for i in at for share in shares[i]]
        rows.append(
            Row(
                name=case.name,
                rate=rate,
                ours=case.ours,
                step_s=step_s,
                speed=tokens / statistics.median(_of_rounds(runs, "s")),
                share=statistics.median(of_case),
                shares=of_case,
                sent=sent,
                message_s=message_s,
                fits=None if case.blocking else message_s < (case.delay or setting.every) * case.fragments * step_s,
                waited_s=statistics.median(_of_rounds(runs, "waited_s")),
                exposed_s=statistics.median(_of_rounds(runs, "waits", exposed)),
                local_s=statistics.median(_of_rounds(runs, "local_s")),
                coding_s=coding_s,
            )
        )
    return rows
