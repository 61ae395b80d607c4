"""Runs the two stages in a lab and makes rows of what they measured."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from linklab import Lab, validate
from linklab.job import run_on_hosts
from linklab.link import goodput_bits, parse_bits, parse_delay

from pipelines import shared_bound
from pipelines.cases import MICRO_BATCHES, Setting
from torch_lowcomm.planner import schedule as bound


@dataclasses.dataclass(frozen=True)
class Row:
    """One case on one link: the median over its turns of the first stage's seconds a step.

    `sent` is what the interfaces of all hosts received a step, both directions of every boundary, headers included. `bound_s` is
    bound.step_s() of the case's order with the stages' times measured without messages, `activation` and `gradient` bytes a
    message, and the link's rate and delay.
    """

    name: str
    order: str
    link: str
    ours: bool
    seconds: float
    least_s: float
    most_s: float
    sent: int
    activation: float
    gradient: float
    bound_s: float

    @property
    def ratio(self) -> float:
        """Of the step to its bound."""
        return self.seconds / self.bound_s


@dataclasses.dataclass(frozen=True)
class Measured:
    """One link: seconds of each stage's forward and backward by itself, what the link is, and a row a case.

    `goodput_bits` is what one TCP stream brings to the other host, the lesser of both ways. `round_trip_s` is a datagram's, where
    there is a delay. `frames_lost` counts those that the lab's forwarder dropped for want of time.
    """

    link: str
    shape: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    goodput_bits: float
    round_trip_s: float | None
    frames_lost: int
    rows: list[Row]


def direction(setting: Setting, goodput: float | None = None) -> bound.Direction:
    """A link's one direction as the simulation has it: TCP's share of the rate, or the bits a second that a TCP stream had where
    the lab is slower than the link, the delay, and the shaper's burst.
    """
    bits = parse_bits(setting.rate)
    assert bits is not None
    delay_s = parse_delay(setting.delay) if setting.delay else 0.0
    return bound.Direction((goodput or goodput_bits(bits)) / 8, delay_s, setting.burst)


def measure(setting: Setting, *, repetitions: int, compute: bool) -> Measured:
    """Runs a setting's cases, whose stages sleep or `compute`. LabError when a rank fails."""
    options = {"delay": setting.delay or None, "burst": setting.burst, "congestion": setting.congestion}
    with Lab(hosts=2, rate=setting.rate, **options) as lab:
        checked = validate.validate(lab, tries=2 if setting.carried else 1, only=("goodput", "round trip"))
        job = {
            "cases": [dataclasses.asdict(case) for case in setting.cases],
            "shape": setting.shape,
            "forward_s": setting.forward_s,
            "backward_s": setting.backward_s,
            "repetitions": repetitions,
            "compute": compute,
        }
        ranks = run_on_hosts(lab, "pipelines.rank", job)
        lost = lab.forwarder_drops()
    goodput = min(row.measured for row in checked if row.what == "goodput")
    link = direction(setting, None if setting.carried else goodput)
    return Measured(
        link=setting.link,
        shape=setting.shape,
        forward_s=tuple(rank["forward_s"] for rank in ranks),
        backward_s=tuple(rank["backward_s"] for rank in ranks),
        goodput_bits=goodput,
        round_trip_s=next((row.measured for row in checked if row.what == "round trip"), None),
        frames_lost=lost,
        rows=rows_of(setting, ranks, link),
    )


def rows_of(setting: Any, ranks: list[dict[str, Any]], link: bound.Direction, *, shared: bool = False) -> list[Row]:
    """Makes a row a case of what all ranks returned, by stage: `rows`, a case each, and the times of a micro-batch by itself, in
    the rows where cases differ in them. With `shared` a stage sends both ways by one link, as shared_bound.step_s().
    """
    rows = []
    for i, case in enumerate(setting.cases):
        stages = [{**rank, **rank["rows"][i]} for rank in ranks]
        first, last = stages[0], stages[-1]
        rows.append(
            Row(
                name=case.name,
                order=case.order,
                link=setting.link,
                ours=case.ours,
                seconds=statistics.median(first["seconds"]),
                least_s=min(first["seconds"]),
                most_s=max(first["seconds"]),
                sent=sum(stage["interface_bytes"] for stage in stages),
                activation=first["message_bytes"],
                gradient=last["message_bytes"],
                bound_s=bound_of(case, stages, link, shared=shared),
            )
        )
    return rows


def bound_of(case: Any, stages: list[dict[str, Any]], link: bound.Direction, *, shared: bool = False) -> float:
    """The least seconds of a case's step; the first stage's messages are activations, and the last one's gradients."""
    boundaries = len(stages) - 1
    times = bound.Times(
        [stage["forward_s"] for stage in stages],
        [stage["backward_s"] for stage in stages],
        [stages[0]["message_bytes"]] * boundaries,
        [stages[-1]["message_bytes"]] * boundaries,
    )
    orders = [bound.order(case.schedule, i, len(stages), MICRO_BATCHES, case.ahead) for i in range(len(stages))]
    return (shared_bound if shared else bound).step_s(orders, times, link)
