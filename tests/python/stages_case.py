"""A small model in stages, for the tests of lc.pipeline: schedules of torch, batches of numbered samples."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import torch_lowcomm as lc
from torch_lowcomm._compatibility import minor

WIDTH, ROWS, MICRO, SAMPLES = 24, 16, 4, 64
CODED = {"forward": "gauss4", "backward": "minmax8:bucket=128"}

SCHEDULES = {
    "GPipe": (pipelining.ScheduleGPipe, 1),
    "1F1B": (pipelining.Schedule1F1B, 1),
    "LoopedBFS": (pipelining.ScheduleLoopedBFS, 2),
    "Interleaved1F1B": (pipelining.ScheduleInterleaved1F1B, 2),
    "InterleavedZeroBubble": (ScheduleInterleavedZeroBubble, 2),
    "ZBVZeroBubble": (ScheduleZBVZeroBubble, 2),
    "DualPipeV": (ScheduleDualPipeV, 2),
}
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
# Stages of torch 2.11 tell shapes by torch's own messages, to their own rank too, and compare each batch's with the first's.
TELLS_SHAPES = pytest.mark.skipif(not lc.pipeline.Stage.tells_shapes, reason="torch's own stages tell shapes here")
INTEGERS_TOO = pytest.mark.skipif(minor(torch.__version__) < (2, 13), reason="stages of this torch pass no integers")
NAMES = [pytest.param(name, marks=TELLS_SHAPES if name in V_SHAPED else ()) for name in SCHEDULES]


def module(index, dtype=torch.float32):
    torch.manual_seed(100 + index)
    # No view at its end: torch detaches a stage's output in place.
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(dtype)


def loss(y, target):
    return (y - target).float().square().mean()


class Spoil(torch.autograd.Function):
    """A NaN in a micro-batch's activation, or of the gradient that goes back."""

    @staticmethod
    def forward(ctx, x, activation, gradient):
        ctx.gradient = gradient
        return x * torch.tensor(float("nan")) if activation else x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * torch.tensor(float("nan")) if ctx.gradient else g, None, None


def data(seed=0):
    """Samples [SAMPLES, T, WIDTH] and targets."""
    generator = torch.Generator().manual_seed(seed)
    return list(
        zip(
            torch.randn(SAMPLES, 3, WIDTH, generator=generator),
            torch.randn(SAMPLES, 3, WIDTH, generator=generator),
            strict=True,
        )
    )


def batch(start=0, rows=ROWS):
    """x and targets of a batch, the first one's rows without others."""
    return tuple(torch.stack(part) for part in zip(*data()[start : start + rows], strict=True))


def step(schedule, x=None, y=None, samples=range(ROWS)):
    """A training step on `batch()`, or on other tensors; its losses, on the last stage."""
    first, target = batch()
    losses = []
    x, y = first if x is None else x, target if y is None else y
    lc.pipeline.step(schedule, x, samples=samples, target=y, losses=losses)
    return losses


def gathered(value, group=None):
    """What each rank of the group has."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def equal_rows(rows, group=None):
    """A cache's rows of a boundary, which must be the same on all ranks of the group."""
    sides = gathered(rows.tolist(), group)
    assert all(side == sides[0] for side in sides)
    return sides[0]


def indices(rank, ranks, name):
    """The stages of a rank under a schedule."""
    per_rank = SCHEDULES[name][1]
    if name in V_SHAPED:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + k * ranks for k in range(per_rank)]


def build(rank, ranks, name, *, micro=MICRO, dtype=torch.float32, stage=None, **options):
    """(schedule, stages) of this rank; `stage` makes them, lc.pipeline.Stage without."""
    kind, per_rank = SCHEDULES[name]
    make = stage or lc.pipeline.Stage
    count = ranks * per_rank
    stages = [make(module(i, dtype), i, count, torch.device("cpu"), **options) for i in indices(rank, ranks, name)]
    given = stages if per_rank > 1 else stages[0]
    return kind(given, micro, loss_fn=loss), stages


def whole(count, dtype=torch.float32):
    """The model in one piece."""
    return nn.Sequential(*(module(i, dtype) for i in range(count)))


def exact_gradients(count, x, y, dtype=torch.float32):
    """Of the whole model, by stage, micro-batch by micro-batch as a schedule adds them."""
    model = whole(count, dtype)
    for part, target in zip(x.chunk(MICRO), y.chunk(MICRO), strict=True):
        (loss(model(part), target) / MICRO).backward()
    return [[p.grad for p in stage.parameters()] for stage in model]


def gradients(stages):
    return [p.grad.clone() for stage in stages for p in stage.submod.parameters()]
