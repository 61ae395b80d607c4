"""The least seconds of a pipeline's step: its schedule's own order, simulated with measured times and a link's rate and delay.

A stage computes one thing at a time, in the schedule's order, as soon as what it needs has arrived. A message enters its link
when it has been computed and those before it have gone. Encoding, decoding and TCP's slow starts cost nothing here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

Order = list[tuple[str, int]]  # ("F" or "B", micro-batch) in the order in which a stage computes them

SCHEDULES = ("GPipe", "1F1B")


def order(schedule: str, stage: int, stages: int, micro_batches: int, ahead: int = 0) -> Order:
    """The computations of one step of stage 0...stages - 1: of "GPipe" all forwards, then all backwards; of "1F1B" as torch's one
    backward and one forward in turn, with `ahead` as `lc.pipeline.Schedule1F1B` has it. Another schedule is a ValueError.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {schedule!r}")
    behind = stages - 1 - stage
    first = micro_batches if schedule == "GPipe" else min(micro_batches, 1 + behind + ahead * behind)
    computed: Order = [("F", i) for i in range(first)]
    for i in range(micro_batches):
        computed.append(("B", i))
        if first + i < micro_batches:
            computed.append(("F", first + i))
    return computed


@dataclasses.dataclass
class Direction:
    """One direction of a link: messages go one after the other, each arrives `delay_s` after its last byte has gone.

    Attributes:
        bytes_per_s: Of the messages' own bytes.
        delay_s: From one end to the other.
        burst_bytes: Of a token bucket (Linux's tbf): so many bytes go at once after a pause.
    """

    bytes_per_s: float
    delay_s: float
    burst_bytes: float = 0.0
    _paid: float = 0.0  # when the bucket will have been filled up again, less its size

    def arrival(self, ready_s: float, size: float) -> float:
        """When a message arrives that is ready at a time; messages are given in the order in which they are."""
        self._paid = max(self._paid, ready_s - self.burst_bytes / self.bytes_per_s) + size / self.bytes_per_s
        return max(ready_s, self._paid) + self.delay_s


@dataclasses.dataclass(frozen=True)
class Times:
    """Measured seconds and bytes of one micro-batch, by stage; the messages of the boundary behind a stage."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    activation_bytes: Sequence[float]
    gradient_bytes: Sequence[float]


def step_s(
    orders: Sequence[Order], times: Times, link: Direction, *, steps: int = 4, one_uplink: bool = False
) -> float:
    """The seconds of a step among others: of several in a row (2 or more) at the first stage, without the first one.

    Orders and times are by stage; of boundaries there is one fewer, and each direction of each is such a link, or, with
    `one_uplink`, all that a stage sends. Orders that wait for each other for ever are a ValueError.
    """
    count = len(orders)
    down = [dataclasses.replace(link) for _ in range(count - 1)]
    up = [*down[1:], dataclasses.replace(link)] if one_uplink else [dataclasses.replace(link) for _ in down]
    program = [[(kind, step, i) for step in range(steps) for kind, i in one] for one in orders]
    clock, at = [0.0] * count, [0] * count
    arrived: dict[tuple[int, str, int, int], float] = {}
    ends: list[float] = []  # of the first stage's steps
    while any(at[s] < len(program[s]) for s in range(count)):
        before = list(at)
        for s in range(count):
            while at[s] < len(program[s]):
                kind, step, i = program[s][at[s]]
                waits = s > 0 if kind == "F" else s < count - 1
                if waits and (s, kind, step, i) not in arrived:
                    break
                start = max(clock[s], arrived.get((s, kind, step, i), 0.0))
                clock[s] = start + (times.forward_s if kind == "F" else times.backward_s)[s]
                if kind == "F" and s < count - 1:
                    arrived[s + 1, "F", step, i] = down[s].arrival(clock[s], times.activation_bytes[s])
                if kind == "B" and s > 0:
                    arrived[s - 1, "B", step, i] = up[s - 1].arrival(clock[s], times.gradient_bytes[s - 1])
                at[s] += 1
                if s == 0 and at[s] % len(orders[0]) == 0:
                    ends.append(clock[s])
        if at == before:
            raise ValueError(f"orders: expected ones that end, got stages that wait at {at}")
    return (ends[-1] - ends[0]) / (steps - 1)
