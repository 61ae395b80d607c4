"""What a plan knows of a training, and the seconds of its steps under each method."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from torch_lowcomm.planner import schedule
from torch_lowcomm.planner.link import Link

BUCKET = 25 << 20  # bytes: DDP's bucket_cap_mb
# Nanoseconds a parameter of one core, besides coding: residuals, factors, FSDP2's copies, outer steps. Fitted to what the
# steps of benchmarks/results/steps.md at 100 Mbit/s and 1 Gbit/s, and of diloco_speed.md, take beyond computing and the link.
PASSES_NS, FACTORS_NS, SHARDS_NS, OUTER_NS = 4.0, 7.0, 14.0, 3.5


@dataclasses.dataclass(frozen=True)
class Coding:
    """A codec on this model's numbers.

    Attributes:
        bits: Bits an element, with scales.
        ns: Nanoseconds an element, encoded and decoded.
        error: ‖decoded - x‖ / ‖x‖ of the model's gradients; None where there was no model.
    """

    bits: float
    ns: float
    error: float | None = None


@dataclasses.dataclass(frozen=True)
class Training:
    """A model, and a step of one rank without communication.

    Attributes:
        parameters: Trained numbers.
        forward_s, backward_s, update_s: Seconds of the parts of a step.
        tokens: Of a rank's batch; 0: not known, and pipelines are not planned.
        width: Of the residual stream between blocks; 0: not known, and pipelines are not planned.
        layers: Blocks.
        matrices: (rows, columns) of the parameters of two dimensions or more, which factors replace.
        codings: Measured or assumed codecs, by text.
        bits: Of a number of the parameters.
        blocks: The list of blocks, as a line of Python has it; empty: there is none.
        unused: Whether a step leaves parameters without a gradient.
    """

    parameters: int
    forward_s: float
    backward_s: float
    update_s: float = 0.0
    tokens: int = 0
    width: int = 0
    layers: int = 1
    matrices: Sequence[tuple[int, int]] = ()
    codings: Mapping[str, Coding] = dataclasses.field(default_factory=dict)
    bits: float = 32.0
    blocks: str = "model.blocks"
    unused: bool = False

    def __post_init__(self) -> None:
        for name, least in (("parameters", 1), ("tokens", 0), ("width", 0), ("layers", 1)):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"plan: {name}: expected {least} or more, got {value}")
        if not (self.forward_s > 0 and self.backward_s >= 0 and math.isfinite(self.step_s)):
            raise ValueError(f"plan: step: expected seconds above 0, got {self.forward_s:g} and {self.backward_s:g}")

    @property
    def step_s(self) -> float:
        """Seconds of a step that sends nothing."""
        return self.forward_s + self.backward_s + self.update_s

    def factor_elements(self, rank: int) -> int:
        """Numbers of the two factors of every matrix that factors make smaller, and of all the rest, which travels as it is."""
        left, factors = self.parameters, 0
        for rows, columns in self.matrices:
            if rank * (rows + columns) < rows * columns:
                left -= rows * columns
                factors += rank * (rows + columns)
        return left + factors

    def coding_s(self, codec: str | None, elements: float) -> float:
        """Seconds in which one core encodes and decodes so many elements."""
        return elements * self.coding(codec).ns * 1e-9

    def coding(self, codec: str | None) -> Coding:
        """A codec's bits, seconds and error; those of the parameters themselves for None."""
        return Coding(self.bits, 0.0, 0.0) if codec is None else self.codings[codec]


def ddp_s(of: Training, link: Link, codec: str | None = None, *, factors: int | None = None) -> tuple[float, float]:
    """DDP: buckets become ready evenly over the backward pass, and travel one after another.

    Returns:
        Seconds of a step, and bytes that a site sends in it. With factors, the elements of which `factors` says, there is one
        bucket, whose factors travel in two exchanges.
    """
    coding, count = of.coding(codec), factors if factors is not None else of.parameters
    size = count * coding.bits / 8 * (1 if codec else link.ranks_per_site)  # exact ops send a copy for each rank
    if link.sites < 2:
        return of.step_s, 0.0
    buckets = 1 if factors is not None else max(1, math.ceil(of.bits / 8 * of.parameters / BUCKET))
    each = max(link.all_reduce_s(size / buckets), of.coding_s(codec, count / buckets))
    each += 2 * link.round_trip_s if factors is not None else 0.0
    sent_s = 0.0
    for bucket in range(buckets):
        ready = of.forward_s + of.backward_s * (bucket + 1) / buckets
        sent_s = max(sent_s, ready) + each
    passes = PASSES_NS * bool(codec) if factors is None else FACTORS_NS
    return sent_s + of.update_s + passes * 1e-9 * of.parameters, 2 * link.share * size


def fsdp_s(of: Training, link: Link, weights: str | None, gradients: str | None) -> tuple[float, float]:
    """FSDP2 with each block gathered while the one before it computes; weights travel twice, gradients once.

    Returns:
        Seconds of a step, and bytes that a site sends in it.
    """
    units = of.layers
    copies = 1 if weights else link.ranks_per_site
    gather, scatter = (copies * of.coding(codec).bits / 8 * of.parameters / units for codec in (weights, gradients))
    gather_s = max(link.gather_s(gather), of.coding_s(weights, of.parameters / units))
    scatter_s = max(link.gather_s(scatter), of.coding_s(gradients, of.parameters / units))
    copies_s = SHARDS_NS * 1e-9 * of.parameters / 3 * (link.sites > 1)  # once forward, twice backward
    forward_s, backward_s = (of.forward_s + copies_s) / units, (of.backward_s + 2 * copies_s) / units
    now = free = 0.0
    for compute_s, reduces in ((forward_s, False), (backward_s, True)):
        free = gathered = max(now, free) + gather_s
        for unit in range(units):
            now = max(now, gathered)
            if unit + 1 < units:
                free = gathered = max(now, free) + gather_s
            now += compute_s
            if reduces:
                free = max(now, free) + scatter_s
    return max(now, free) + of.update_s, link.share * units * (2 * gather + scatter)


def outer_s(
    of: Training,
    link: Link,
    codec: str | None,
    every: int,
    mode: str,
    *,
    factors: int | None = None,
    fragments: int = 1,
) -> tuple[float, float]:
    """An outer loop: a message every so many steps, for which training waits ("sync") or which has an interval or, in
    fragments, five steps of it ("restart").

    Returns:
        Seconds of a step, and bytes that a site sends in it.
    """
    count = factors if factors is not None else of.parameters
    size = count * of.coding(codec).bits / 8
    message = max(link.all_reduce_s(size / fragments), of.coding_s(codec, count / fragments))
    local = OUTER_NS * 1e-9 * of.parameters + of.coding_s(codec, count)
    local += FACTORS_NS * 1e-9 * of.parameters if factors is not None else 0.0
    span = every * of.step_s
    hidden = {"sync": 0.0, "restart": 5 * of.step_s, "continue": span}[mode]
    waited = max(fragments * max(0.0, message - hidden), fragments * message - span if mode != "sync" else 0.0)
    return (span + waited + local) / every, 2 * link.share * size / every


def pipeline_s(of: Training, link: Link, forward_bits: float, backward_bits: float) -> tuple[float, float]:
    """A pipeline of a stage a rank under 1F1B, for the batches of all ranks: 8 micro-batches a stage and more.

    Returns:
        Seconds of a step, and bytes that a site sends in it.
    """
    stages, micro = link.ranks, 8 * link.ranks
    numbers = of.tokens * link.ranks / micro * of.width  # of one micro-batch at a boundary
    times = schedule.Times(
        [of.forward_s * link.ranks / micro / stages] * stages,
        [of.backward_s * link.ranks / micro / stages] * stages,
        *([numbers * bits / 8] * (stages - 1) for bits in (forward_bits, backward_bits)),
    )
    orders = [schedule.order("1F1B", stage, stages, micro, ahead=1) for stage in range(stages)]
    way = schedule.Direction(link.carried, link.round_trip_s / 2)
    sent = numbers * micro * (forward_bits + backward_bits * (stages > 2)) / 8
    return schedule.step_s(orders, times, way, one_uplink=True) + of.update_s / stages, sent
