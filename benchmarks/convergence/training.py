"""The parts that data parallel runs on text have in common: their steps, and the perplexity of their models."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import text
import torch
from data import Corpus
from measure import mean_over_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

BATCHES, WINDOWS = 16, 32  # a rank; windows a batch


def sharded(gpt: nn.Module, world: int) -> nn.Module:
    """Shards a GPT by FSDP2, a block a group of parameters; returns it."""
    mesh = init_device_mesh("cpu", (world,))
    for block in gpt.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(gpt, mesh=mesh)


def steps(called: nn.Module, optimizer: Any, c: Any, *, rank: int, context: int) -> Iterator[tuple[float, float]]:
    """Makes the steps of a run with windows of `context` bytes; yields the loss of each that `called` returns, the mean over
    ranks, and the seconds since the first began.
    """
    corpus = text.load()
    start = time.monotonic()
    for step in range(c.steps):
        loss = called(*corpus.batch(c.batch, context, seed=c.seed, step=step, rank=rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield mean_over_ranks(loss), time.monotonic() - start


def perplexity(
    gpt: nn.Module, corpus: Corpus, context: int, *, rank: int, world: int, batches_a_rank: int = BATCHES
) -> float:
    """Exp of the mean cross entropy (nats a byte) of a model over every rank's batches. Collective."""
    with torch.no_grad():
        turns = range(rank, batches_a_rank * world, world)
        batches = [corpus.validation_batch(WINDOWS, context, turn) for turn in turns]
        return math.exp(mean_over_ranks(torch.stack([gpt(*batch) for batch in batches]).mean()))
