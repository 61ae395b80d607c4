"""Perplexity on the validation text, shared out among the ranks."""

from __future__ import annotations

import math

import torch
from data import Corpus
from measure import mean_over_ranks
from torch import nn

BATCHES, WINDOWS = 16, 32  # a rank; windows a batch


def perplexity(
    gpt: nn.Module, corpus: Corpus, context: int, *, rank: int, world: int, batches_a_rank: int = BATCHES
) -> float:
    """Exp of the mean cross entropy (nats a byte) of a model over every rank's batches. Collective."""
    with torch.no_grad():
        turns = range(rank, batches_a_rank * world, world)
        batches = [corpus.validation_batch(WINDOWS, context, turn) for turn in turns]
        return math.exp(mean_over_ranks(torch.stack([gpt(*batch) for batch in batches]).mean()))
