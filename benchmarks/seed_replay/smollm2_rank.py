"""One rank of smollm2.py: tunes a classifier by one way, and counts what it sends."""

from __future__ import annotations

import dataclasses
import functools
import resource
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import classifier
import sentences
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import torch_lowcomm as lc


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One run, by "seed replay" or "back-propagation" (`way`); the model is as classifier.build() takes it, `data` the path of
    the sentences, `batch` those of a rank and step, `validation` those that accuracy is measured on.
    """

    way: str
    lr: float
    model: str | None
    data: str
    steps: int = 140
    batch: int = 8
    validation: int = 200
    seed: int = 0


def tune(rank: int, init_method: str, *, configuration: Configuration) -> dict[str, Any]:
    """Tunes one model.

    Returns:
        `loss` of this rank's sentences by step; `accuracy` before and after; `sent_bytes` in collectives behind the first step,
        frames included, but gloo's headers; `memory`, the process's highest resident bytes; `seconds` of the steps; `checksum`
        of the weights.
    """
    c = configuration
    dist.init_process_group("lowcomm", init_method=init_method, rank=rank, world_size=2)
    found = sentences.load(Path(c.data))
    validation = found.validation[: c.validation]
    model = classifier.build(c.model, found.classes, found.prompt, torch.device("cpu"))
    result: dict[str, Any] = {"loss": [], "accuracy": [classifier.accuracy(model, validation)]}
    called, step = _WAYS[c.way](model, c)
    start, sent_in_first = time.monotonic(), 0
    for number in range(c.steps):
        texts, classes = classifier.labelled(found.batch(c.batch, c.seed, rank, number))
        result["loss"].append(step(functools.partial(loss_of, called, texts, classes)))
        sent_in_first = sent_in_first or sent()
        if rank == 0:
            print(f"# {c.way} step {number + 1}: loss {result['loss'][-1]:.4f}", file=sys.stderr, flush=True)
    result["seconds"] = time.monotonic() - start
    result["sent_bytes"] = sent() - sent_in_first
    result["accuracy"].append(classifier.accuracy(model, validation))
    result["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result["checksum"] = 0
    for parameter in model.parameters():
        result["checksum"] = zlib.crc32(parameter.detach().numpy().tobytes(), result["checksum"])
    dist.destroy_process_group()
    return result


def loss_of(model: nn.Module, texts: list[str], classes: Tensor) -> Tensor:
    """Mean cross entropy of sentences' classes."""
    return functional.cross_entropy(model(texts), classes)


def sent() -> int:
    """Bytes that this rank has sent in collectives so far."""
    ops = [op for group in lc.stats().values() for op in group.values()]
    return sum((op["wire_bytes"] or 0) + (op["inner_bytes"] or 0) for op in ops)


Step = Callable[[Callable[[], Tensor]], float]  # of a closure that computes the loss; returns it


def _seed_replay(model: nn.Module, c: Configuration) -> tuple[nn.Module, Step]:
    optimizer = lc.SeedReplay(model, lr=c.lr, samples=1, seed=c.seed, group=dist.group.WORLD)
    return model, lambda loss: float(optimizer.step(loss))


def _back_propagation(model: nn.Module, c: Configuration) -> tuple[nn.Module, Step]:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=c.lr, fused=True)

    def step(loss: Callable[[], Tensor]) -> float:
        value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(value.detach())

    return wrapped, step


_WAYS: dict[str, Callable[[nn.Module, Configuration], tuple[nn.Module, Step]]] = {
    "seed replay": _seed_replay,
    "back-propagation": _back_propagation,
}
