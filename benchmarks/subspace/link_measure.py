"""Runs the stages of a setting in a lab and makes rows of what they measured."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from linklab import Lab, validate
from linklab.job import run_on_hosts
from linklab.link import goodput_bits, parse_bits
from pipelines.cases import MICRO_BATCHES
from pipelines.measure import Row, rows_of

from subspace.link_cases import Setting
from torch_lowcomm.planner import schedule as bound

UNLIMITED = 1e15  # bytes a second


@dataclasses.dataclass(frozen=True)
class Measured:
    """One setting on one link.

    Attributes:
        stages: Of the pipeline.
        link: As the setting has it.
        forward_s: Seconds of a micro-batch's forward by itself, by stage, of the first case.
        backward_s: The same of its backward.
        goodput_share: What one TCP stream has of the link's rate, the least of the ways; None of an unlimited one.
        rows: A case each.
        generated: By name of a case that generates: seconds until all prompts have their first token, and seconds
            of one token more of all prompts; medians.
    """

    stages: int
    link: str
    forward_s: list[float]
    backward_s: list[float]
    goodput_share: float | None
    rows: list[Row]
    generated: dict[str, tuple[float, float]]

    @property
    def compute_s(self) -> float:
        """Of a step, on the slowest stage."""
        return MICRO_BATCHES * max(sum(both) for both in zip(self.forward_s, self.backward_s, strict=True))

    @property
    def uncompressed_bytes(self) -> float:
        """Of a step's activations and gradients at one boundary, of the first case."""
        return MICRO_BATCHES * (self.rows[0].activation + self.rows[0].gradient)

    def row(self, name: str) -> Row:
        """By name, of the first schedule that has it."""
        return next(row for row in self.rows if row.name == name)

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        rows = [dataclasses.asdict(row) | {"ratio": row.ratio} for row in self.rows]
        return dataclasses.asdict(self) | {"rows": rows, "compute_s": self.compute_s}


def direction(setting: Setting) -> bound.Direction:
    """A host's way out as the simulation has it: TCP's share of the rate, and the shaper's burst."""
    bits = parse_bits(setting.rate)
    if bits is None:
        return bound.Direction(UNLIMITED, 0.0)
    return bound.Direction(goodput_bits(bits) / 8, 0.0, setting.burst or 0)


def measure(setting: Setting) -> Measured:
    """Runs a setting's cases. LabError when a rank fails.

    A host has one rate for all that it sends, and the link none for what it receives: a stage in the middle sends activations
    and gradients by the same way, as the simulation has it.
    """
    limited = setting.rate != "unshaped"
    rate = f"{setting.rate}/unshaped" if limited else "unshaped"
    with Lab(hosts=setting.stages, rate=rate, burst=setting.burst, congestion="reno") as lab:
        checked = validate.validate(lab, tries=2, only=("goodput",)) if limited else []
        ranks = run_on_hosts(lab, "subspace.link_rank", setting.job())
    goodput = [row.measured / row.expected for row in checked if row.what == "goodput" and row.expected]
    generated = {
        name: tuple(statistics.median(seconds) for seconds in zip(*turns, strict=True))
        for name, turns in ranks[0]["generated"].items()
    }
    first = [rank["rows"][0] for rank in ranks]
    return Measured(
        stages=setting.stages,
        link=setting.link,
        forward_s=[row["forward_s"] for row in first],
        backward_s=[row["backward_s"] for row in first],
        goodput_share=min(goodput, default=None),
        rows=rows_of(setting, ranks, direction(setting), shared=True),
        generated=generated,
    )
