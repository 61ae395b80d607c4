"""What the runs of `convergence aq` train on: windows of text, or sentences with a class each."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import model
import sentences
import text
import torch
from torch import Tensor
from torch.nn import functional

CONTEXT = model.Config().context
TEXT, SENTENCES = "text", "sentences"


def training(task: str, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """The samples of a run: tokens [count, CONTEXT] with the byte after each of them, or of a sentence with its class [count]."""
    if task == SENTENCES:
        return encoded(random.Random(seed).sample(sentences.load().train, count))
    return text.load().batch(count, CONTEXT, seed=seed, step=0, rank=1)


def validation(task: str, count: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of others, equal for all runs."""
    if task == SENTENCES:
        tokens, classes = encoded(sentences.load().validation[:count])
        yield from zip(tokens.split(batch), classes.split(batch), strict=True)
        return
    corpus = text.load()
    yield from (corpus.validation_batch(batch, CONTEXT, i) for i in range(count // batch))


def encoded(pairs: Sequence[tuple[str, int]]) -> tuple[Tensor, Tensor]:
    """Sentences as bytes, cut or filled with spaces to CONTEXT, and their classes."""
    rows = [text.encode("ascii", "replace")[:CONTEXT].ljust(CONTEXT) for text, _ in pairs]
    return torch.tensor([list(row) for row in rows]), torch.tensor([index for _, index in pairs])


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats, of a byte or of a sentence."""
    return functional.cross_entropy(logits.float().flatten(0, -2), targets.flatten())
