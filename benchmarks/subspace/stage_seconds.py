"""Measured seconds a token of stages of a block each: one in the middle of a pipeline, and the last one."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

import model
import torch
from convergence.subspace.rounded import Whole
from pipelines.compute import alone
from torch import nn

import torch_lowcomm as lc

STAGES = 3


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


def stages(kind: str, *, width: int, vocabulary: int, context: int) -> list[nn.Module]:
    """The second and the last of three stages: "whole" with all numbers at their boundaries, "constrained" with an eighth."""
    torch.manual_seed(0)
    gpt = model.GPT(model.Config(width=width, layers=STAGES, heads=max(1, width // 64), context=context))
    gpt.embed, gpt.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
    if kind == "constrained":
        gpt = lc.subspace.constrain(gpt, width // 8, sigma=0.1)
    boundary = Whole(width) if kind == "whole" else None
    return [lc.subspace.cut(gpt, index, STAGES, boundary=boundary) for index in range(1, STAGES)]


def measure(*, width: int, vocabulary: int, context: int, repetitions: int) -> dict[str, StageSeconds]:
    """By kind, medians over so many turns of each stage, and one more that is not counted; a micro-batch is one sequence of
    `context` tokens, and stages of both kinds have their turns.
    """
    of_kind = {
        kind: stages(kind, width=width, vocabulary=vocabulary, context=context) for kind in ("whole", "constrained")
    }
    ids = torch.randint(vocabulary, (1, context))
    taken: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for repetition in range(-1, repetitions):
        for kind, modules in of_kind.items():
            for stage in modules:
                both = alone(stage, torch.randn(1, context, stage.rank), last=stage.is_last, ids=ids)
                if repetition >= 0:
                    taken.setdefault((kind, stage.index), []).append(both)
    found = {}
    for kind in of_kind:
        forward, backward = (
            [statistics.median(both[way] for both in taken[kind, index]) / context for index in range(1, STAGES)]
            for way in (0, 1)
        )
        found[kind] = StageSeconds(forward, backward)
    return found
