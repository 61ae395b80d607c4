"""Scores of pipelines over slow links: steps to a loss times simulated seconds a step, and which method has the least.

The shape is that of Protocol NanoGPT's records (2026): 203 million parameters, which 8 blocks of width 1,024, an embedding and a
head of 50,304 tokens have; 8 stages of a block each, 200 Mbit/s and 50 ms a link, 1F1B. TOKENS a step and MICRO_BATCHES are
ours: 80.6 s less for 3,452 bytes less a token are 23 ms a byte, and a byte of so many tokens takes 21 ms at 200 Mbit/s. With the
machines' speed (`factor_of_record`) they are three choices for two published numbers: a fit of them, and no prediction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from linklab.link import goodput_bits

import torch_lowcomm as lc
from torch_lowcomm.planner import schedule as bound

WIDTH, STAGES, TOKENS, MICRO_BATCHES = 1024, 8, 524_288, 32
RATES, DELAYS = (20e6, 80e6, 200e6, 1000e6), (0.0, 0.025, 0.050)  # bits a second; seconds each way
RATE, DELAY = 200e6, 0.050


@dataclasses.dataclass(frozen=True)
class Method:
    """A way of a boundary's messages.

    Attributes:
        name: In a row.
        run: Of `convergence subspace`, at width 256, whose steps it has.
        share: Numbers that cross, of the width.
        code: What a number travels as: "bf16", "fp32" or a codec.
        kind: Of subspace.link_cases.Case: whose stages' seconds it has.
    """

    name: str
    run: str
    share: float
    code: str
    kind: str = "constrained"

    def token_bytes(self, width: int = WIDTH) -> float:
        """Each way, without frames."""
        numbers = round(self.share * width)
        if self.code in ("bf16", "fp32"):
            return numbers * (2 if self.code == "bf16" else 4)
        tokens = 1024  # of a message, so that its last bucket is a small part
        return lc.codec(self.code).encoded_bytes(tokens * numbers) / tokens


BF16 = "bf16 of all"
METHODS = (
    Method(BF16, "free", 1, "bf16", "whole"),
    Method("4 bits of all", "4 bits of all", 1, "minmax4:bucket=256", "whole"),
    Method("2 bits of all", "2 bits of all", 1, "minmax2:bucket=256", "whole"),
    Method("gauss4 of all", "gauss4 of all", 1, "gauss4", "whole"),
    Method("constrained, d/8 in fp32", "constrained, 32", 1 / 8, "fp32"),
    Method("constrained, d/8 in bf16", "constrained, 32 in bf16", 1 / 8, "bf16"),
    Method("constrained, d/8 in 8 bits", "constrained, 32 in 8 bits", 1 / 8, "minmax8:bucket=128"),
    Method("constrained, d/4 in 4 bits", "constrained, 64 in 4 bits", 1 / 4, "minmax4:bucket=128"),
    Method("constrained, d/8 in 4 bits", "constrained, 32 in 4 bits", 1 / 8, "minmax4:bucket=128"),
)


@dataclasses.dataclass(frozen=True)
class Record:
    """A published result: bytes a token both ways, seconds a step, and steps to its loss."""

    name: str
    token_bytes: float
    seconds: float
    steps: int
    kind: str


RECORDS = (
    Record("record, bf16 of all", 4096, 100.5, 2925, "whole"),
    Record("record, k = 160 of 1024", 644, 19.9, 9125, "constrained"),
)


@dataclasses.dataclass(frozen=True)
class StageSeconds:
    """Seconds a token of a forward and a backward, on a stage in the middle and on the last.

    The first stage takes as long as one in the middle: its embedding is a lookup.
    """

    forward: Sequence[float]
    backward: Sequence[float]

    def faster(self, factor: float) -> StageSeconds:
        """The same on something that computes so many times as fast."""
        return StageSeconds([s / factor for s in self.forward], [s / factor for s in self.backward])

    def of_micro_batch(self) -> tuple[list[float], list[float]]:
        """By stage."""
        tokens = TOKENS / MICRO_BATCHES
        forward, backward = (
            [tokens * s for s in (*[middle] * (STAGES - 1), last)] for middle, last in (self.forward, self.backward)
        )
        return forward, backward


Seconds = Mapping[str, StageSeconds]  # by kind: "whole", "constrained"


def step_s(token_bytes: float, stages: StageSeconds, *, rate: float = RATE, delay: float = DELAY) -> float:
    """Simulated seconds of a step of 1F1B, whose boundaries carry `token_bytes` each way, by links of a rate (bits a second of
    each direction, headers included) and a delay (seconds each way).
    """
    message = [token_bytes * TOKENS / MICRO_BATCHES] * (STAGES - 1)
    orders = [bound.order("1F1B", stage, STAGES, MICRO_BATCHES) for stage in range(STAGES)]
    link = bound.Direction(goodput_bits(rate) / 8, delay)
    times = bound.Times(*stages.of_micro_batch(), message, message)
    return bound.step_s(orders, times, link, steps=3)


def factor_of_record(seconds: Seconds, record: Record = RECORDS[1]) -> float:
    """How many times as fast as measured stages compute where the simulated step of a record takes its seconds; a ValueError
    where its messages alone take longer.
    """

    def simulated(factor: float) -> float:
        return step_s(record.token_bytes / 2, seconds[record.kind].faster(factor))

    low, high = 1e-3, 1e9
    if simulated(high) > record.seconds:
        raise ValueError(f"expected at most {record.seconds} s of {record.name}'s messages, got {simulated(high):.1f}")
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if simulated(middle) > record.seconds else (low, middle)
    return high


@dataclasses.dataclass(frozen=True)
class Score:
    """Steps to the target times seconds a step; None where the target is not reached."""

    name: str
    token_bytes: float
    steps: float | None
    seconds: float

    @property
    def total_s(self) -> float | None:
        """The score."""
        return None if self.steps is None else self.steps * self.seconds


def scores(steps: Mapping[str, float | None], seconds: Seconds, *, rate: float, delay: float) -> list[Score]:
    """Those of all methods that were trained: by run the steps of target_steps.of_runs(), by kind the seconds of a stage."""
    return [
        Score(
            method.name,
            method.token_bytes(),
            steps[method.run],
            step_s(method.token_bytes(), seconds[method.kind], rate=rate, delay=delay),
        )
        for method in METHODS
        if method.run in steps
    ]


def winner(found: Sequence[Score]) -> Score:
    """The least score; ValueError where no method reaches the target."""
    reached = {score.total_s: score for score in found if score.total_s is not None}
    if not reached:
        raise ValueError("expected a method that reaches the target, got none")
    return reached[min(reached)]


def records_ratio(seconds: Seconds, *, rate: float, delay: float) -> float:
    """Simulated score of the constrained record over that of the other, with their own steps, on another link."""
    uncompressed, coded = (
        record.steps * step_s(record.token_bytes / 2, seconds[record.kind], rate=rate, delay=delay)
        for record in RECORDS
    )
    return coded / uncompressed
