"""What a method costs in loss: factors on the loss of exact training, each with its range and its source."""

from __future__ import annotations

import dataclasses
import math

MEASURED, PUBLISHED, PRIOR, NOT_KNOWN = "measured", "published", "prior", "not known"


@dataclasses.dataclass(frozen=True)
class Factor:
    """A factor on the loss.

    Attributes:
        value, low, high: The factor and its range: the least and the most of the seeds, or what the source leaves open.
        kind: MEASURED (in benchmarks/results), PUBLISHED, PRIOR (an assumption) or NOT_KNOWN.
        source: The file and the size of the model, or the paper.
    """

    value: float
    low: float
    high: float
    kind: str
    source: str


def product(*factors: Factor) -> Factor:
    """Multiplies factors of independent causes; the product is as sure as the least sure of them."""
    kinds = (MEASURED, PUBLISHED, PRIOR, NOT_KNOWN)
    values = [math.prod(getattr(factor, name) for factor in factors) for name in ("value", "low", "high")]
    sources = [factor.source for factor in factors if factor is not EXACT]
    return Factor(*values, max((factor.kind for factor in factors), key=kinds.index), "; ".join(sources) or "exact")


EXACT = Factor(1.0, 1.0, 1.0, MEASURED, "exact")
UNKNOWN = Factor(math.nan, math.nan, math.nan, NOT_KNOWN, "fine-tuning by forward passes alone: no row to compare with")

# (JSON of benchmarks/results, name of the curve) -> mean, least and most over seeds of (its loss / exact training's); of
# diloco_lab at two sites, / DiLoCo's in float32. tests/python/planner/test_planner.py computes them from the files.
ROWS: dict[tuple[str, str], tuple[float, float, float]] = {
    ("ddp", "sym4"): (1.0028, 1.0000, 1.0055),
    ("ddp", "gauss4"): (1.0030, 0.9993, 1.0083),
    ("ddp", "rank 4, sym8"): (1.0653, 1.0549, 1.0733),
    ("fsdp_bits", "W8G8"): (0.9991, 0.9978, 0.9998),
    ("fsdp_bits", "W6G4"): (1.0012, 0.9990, 1.0040),
    ("fsdp_bits", "W4G4"): (1.0074, 1.0024, 1.0127),
    ("aq_sgd", "DirectQ gauss4/gauss4"): (0.9852, 0.9852, 0.9852),
    ("aq_sgd", "AQ gauss2/gauss4"): (1.0016, 1.0008, 1.0030),
    ("subspace", "constrained, 32"): (1.0178, 0.9990, 1.0273),
    ("diloco_lab", "sync gauss2"): (0.9979, 0.9941, 1.0045),
    ("diloco_lab", "streaming gauss2"): (0.9977, 0.9931, 1.0042),
    ("diloco_lab", "continue gauss2"): (1.0142, 1.0101, 1.0194),
}
_SIZES = {
    "ddp": "0.8 M parameters",
    "fsdp_bits": "0.8 M parameters",
    "aq_sgd": "fine-tuning, 0.8 M parameters",
    "subspace": "4.8 M parameters",
    "diloco_lab": "1.6 M parameters",
}


def measured(name: str, curve: str) -> Factor:
    """A row of this library's benchmarks; a gain is planned as 1, because it is the seeds' or a regulariser's."""
    value, low, high = ROWS[name, curve]
    kind = PRIOR if name == "aq_sgd" else MEASURED  # trainings from scratch were not measured over seeds
    return Factor(max(value, 1.0), low, max(high, 1.0), kind, f"results/{name}.json ({_SIZES[name]})")


def sites(parameters: int, count: int) -> Factor:
    """DiLoCo's loss on `count` sites over one's, every 30 steps: ln of it = .00317·(N/10⁹)^-.24·(log₂ M)^1.55.

    Fitted to Table 4 of arXiv 2503.09799, 35 M to 2.4 B parameters, to an rms of .0008.
    """
    if count < 2:
        return EXACT
    gap = 0.00317 * (parameters / 1e9) ** -0.24 * math.log2(count) ** 1.55
    inside = 35e6 <= parameters <= 2.4e9
    off = 0.0016 if inside else 0.5 * gap
    values = (math.exp(gap), math.exp(gap - off), math.exp(gap + off))
    return Factor(*values, PUBLISHED if inside else PRIOR, "Table 4 of arXiv 2503.09799")


def interval(parameters: int, count: int, every: int) -> Factor:
    """What another interval than 30 steps does to it: the gap grows as ln H, which is an assumption; 1 step is DDP."""
    if every < 2:
        raise ValueError(f"plan: sync_every: expected 2 or more, got {every}: one step is data parallel training")
    gap = math.log(sites(parameters, count).value)
    more = gap * (math.log(every) / math.log(30) - 1)
    low, high = sorted((math.exp(0.5 * more), math.exp(1.5 * more)))
    return Factor(math.exp(more), low, high, PRIOR, "the gap grows as ln H")


def tokens(factor: float, parameters: int, count: float) -> float:
    """How many times as many tokens undo a factor on the loss; infinity where none do.

    By L(N, D) = 1.8172 + 482.01/N^.3478 + 2085.43/D^.3658 (arXiv 2404.10102) for D = `count` tokens.
    """
    model = 1.8172 + 482.01 / parameters**0.3478
    data = 2085.43 / count**0.3658
    left = (model + data) / factor - model
    if factor <= 1:
        return 1.0
    return (data / left) ** (1 / 0.3658) if left > 0 else math.inf
