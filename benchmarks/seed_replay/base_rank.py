"""One process of base.py: measures a base's loss, the seconds of its steps, and its memory."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import pydoc_data.topics
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import data
import model
import torch
from torch import Tensor, nn

import torch_lowcomm as lc
from seed_replay.cost import keep_blocks_out_of_heap, peak, resident_bytes, timed

SHAPE = model.Config(width=64, layers=2)  # 0.11 million parameters
WINDOWS = 256  # of validation
LAYERS, WIDTH = 16, 2048  # of the net whose memory is looked at
POOLS = (16, 64, 256)


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Of `tune`: steps of back-propagation that made the base, then iterations of seed replay along a pool's directions."""

    trained: int = 200
    steps: int = 150
    samples: int = 4
    batch: int = 16
    pool: int = 256
    lr: float = 2e-3  # found on seed 100 in float32
    eps: float = 1e-3


def tune(rank: int, init_method: str, *, base: str | None, seed: int, configuration: Configuration) -> dict[str, Any]:
    """Trains a GPT on source text and tunes it on English.

    Returns:
        Validation loss on English (nats a byte) `before` tuning, of the float32 weights, and `after`; `seconds` of tuning.
    """
    c = configuration
    gpt = trained(seed, c)
    english = data.load(Path(pydoc_data.topics.__file__))
    before = validation(gpt, english)
    optimizer = lc.SeedReplay(gpt, c.lr, eps=c.eps, samples=c.samples, pool=c.pool, base=base, seed=seed)
    start = time.monotonic()
    for step in range(c.steps):
        batches = [
            english.batch(c.batch, SHAPE.context, seed=seed, step=step, rank=sample) for sample in range(c.samples)
        ]

        def loss(sample: int, batches: list[tuple[Tensor, Tensor]] = batches) -> Tensor:
            return gpt(*batches[sample])

        optimizer.step(loss)
    return {"before": before, "after": validation(gpt, english), "seconds": time.monotonic() - start}


def trained(seed: int, c: Configuration) -> model.GPT:
    """A GPT after AdamW on the sources of Python's library."""
    torch.manual_seed(seed)
    gpt = model.GPT(SHAPE)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=2e-3, fused=True)
    sources = data.load()
    for step in range(c.trained):
        gpt(*sources.batch(c.batch, SHAPE.context, seed=seed, step=step, rank=0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return gpt.eval()


def validation(gpt: nn.Module, corpus: data.Corpus) -> float:
    """The mean loss over windows of the validation text."""
    with torch.no_grad():
        return float(gpt(*corpus.validation_batch(WINDOWS, SHAPE.context, 0)))


def step_seconds(rank: int, init_method: str, *, repetitions: int) -> list[dict[str, Any]]:
    """Seconds of an iteration of two samples on the base model, bases and pools in turn; a ratio is to fp32's of its turn."""
    corpus, shape = data.load(), model.Config()
    batches = [corpus.batch(16, shape.context, seed=0, step=step, rank=0) for step in range(2)]
    steps = {}
    for pool in POOLS:
        for base in (None, "int8", "nf4"):
            torch.manual_seed(0)
            gpt = model.GPT(shape).eval()
            optimizer = lc.SeedReplay(gpt, 1e-6, samples=2, pool=pool, base=base)
            # A step that sets every sum, so that all of the pool's directions take part from then on.
            if base:
                optimizer.core.sums = [1e-6] * pool
            steps[pool, base] = lambda optimizer=optimizer, gpt=gpt: optimizer.step(
                lambda sample: gpt(*batches[sample])
            )
    for step in steps.values():
        step()
    turns = [{key: timed(step) for key, step in steps.items()} for _ in range(repetitions)]
    rows = []
    for pool, base in steps:
        ratios = [turn[pool, base] / turn[pool, None] for turn in turns]
        rows.append(
            {
                "base": base or "fp32",
                "pool": pool,
                "step_s": statistics.median(turn[pool, base] for turn in turns),
                "ratio": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
            }
        )
    return rows


def resident(rank: int, init_method: str, *, base: str | None) -> dict[str, float]:
    """Bytes a parameter that a model and its optimizer keep resident, and by which a step's peak is above them."""
    keep_blocks_out_of_heap()
    x = torch.randn(16, WIDTH)

    def machine(layers: int) -> Callable[[], float]:
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))).eval()
        optimizer = lc.SeedReplay(net, 1e-6, samples=1, pool=16, base=base)
        return lambda: optimizer.step(lambda: net(x).square().mean())

    machine(1)()  # of libraries what a step needs is in memory from here on
    settle()
    before = resident_bytes()
    step = machine(LAYERS)
    step()
    settle()
    parameters = LAYERS * WIDTH * WIDTH
    kept = resident_bytes() - before
    return {"resident": kept / parameters, "peak": peak(step) * 1.024e6 / parameters}


def settle() -> None:
    """Gives memory that is free back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
