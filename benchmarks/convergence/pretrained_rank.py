"""One rank of `pretrained.py`: fine-tunes a causal language model, counts what it sends, measures the validation loss."""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import data
import torch
import torch.distributed as dist
from measure import mean_over_ranks, reduced_bytes, sent_bytes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import torch_lowcomm as lc


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One run.

    Attributes:
        method: `fsdp` (FSDP2 with `options` of lc.fsdp.quantize), `ddp` (DDP, an exact all_reduce a step), or `diloco`
            (lc.DiLoCoX with `options`), or `stages` (`pretrained_stages.py`).
        batch: Windows a rank and step.
        context: Tokens a window.
        windows: Windows of the validation text a rank.
        stages: Of `stages`, as many processes; the others have `ranks`.
        rate: Of the link between the hosts of a lab that the stages are on; "" of stages on loopback.
    """

    method: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    steps: int = 20
    warm_up: int = 5
    batch: int = 2
    context: int = 128
    windows: int = 8
    lr: float = 3e-5
    ranks: int = 2
    seed: int = 0
    stages: int = 2
    rate: str = ""


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A model as a method trains it: `model` is called for the loss, `sent` has the bytes that this rank has sent so far, frames
    included, and `end` comes after the last step, before validation.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    sent: Callable[[], int]
    end: Callable[[], None] = lambda: None


def train(rank: int, init_method: str, *, configuration: Configuration, model: str, text: str) -> dict[str, Any]:
    """Trains one model; bytes, memory and seconds are this rank's, losses means over ranks.

    `model` and `text` are files of torch.save: a causal language model of transformers, and {"train": tokens, "validation":
    tokens}, int64 vectors. Returns lists with an element a step, `loss` (nats a token), `bytes` (sent so far) and `seconds`;
    `before` and `after`, the validation loss, with weights as the run's own gathers deliver them, of `diloco` the outer ones;
    `memory`, the process's highest resident bytes.
    """
    c = configuration
    dist.init_process_group("lowcomm", init_method=init_method, rank=rank, world_size=c.ranks)
    torch.manual_seed(c.seed)
    corpus = data.Corpus(**torch.load(text, weights_only=True))
    trainer = _TRAINERS[c.method](torch.load(model, weights_only=False), c)
    run: dict[str, Any] = {"loss": [], "bytes": [], "seconds": [], "before": validation(trainer.model, corpus, c, rank)}
    sent_before = trainer.sent()
    start = time.monotonic()
    for step in range(c.steps):
        for group in trainer.optimizer.param_groups:
            group["lr"] = c.lr * min(1, (step + 1) / c.warm_up)
        loss = token_loss(trainer.model, corpus.batch(c.batch, c.context, seed=c.seed, step=step, rank=rank))
        loss.backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        run["bytes"].append(trainer.sent() - sent_before)
        run["seconds"].append(time.monotonic() - start)
        run["loss"].append(mean_over_ranks(loss))
        if rank == 0:
            print(f"# {c.method} step {step + 1}: loss {run['loss'][-1]:.4f}", file=sys.stderr, flush=True)
    trainer.end()
    run["bytes"][-1] = trainer.sent() - sent_before
    run["after"] = validation(trainer.model, corpus, c, rank)
    run["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    dist.destroy_process_group()
    return run


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy of (windows, context) tokens and the tokens after them, nats a token."""
    tokens, targets = batch
    logits = model(input_ids=tokens, use_cache=False).logits  # [windows, context, vocabulary]
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def validation(model: nn.Module, corpus: data.Corpus, c: Configuration, rank: int) -> float:
    """The mean loss over every rank's windows of the validation text. Collective."""
    turns = range(rank, c.windows // c.batch * c.ranks, c.ranks)
    with torch.no_grad():
        losses = [token_loss(model, corpus.validation_batch(c.batch, c.context, turn)) for turn in turns]
        return mean_over_ranks(torch.stack(losses).mean())


def _adamw(model: nn.Module, c: Configuration) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=c.lr, fused=True)


def _fsdp(model: nn.Module, c: Configuration) -> Trainer:
    mesh = init_device_mesh("cpu", (c.ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    lc.fsdp.quantize(model, **c.options)
    return Trainer(model, _adamw(model, c), lambda: sent_bytes("all_gather") + sent_bytes("reduce_scatter"))


def _ddp(model: nn.Module, c: Configuration) -> Trainer:
    # Means of losses are all_reduces too, of 4 bytes: a hundred-millionth of what DDP sends.
    return Trainer(DistributedDataParallel(model, gradient_as_bucket_view=True), _adamw(model, c), reduced_bytes)


def _diloco(model: nn.Module, c: Configuration) -> Trainer:
    outer = lc.DiLoCoX(_adamw(model, c), model=model, **c.options)
    return Trainer(model, outer, lambda: sent_bytes("outer_step"), outer.finish)


_TRAINERS: dict[str, Callable[[nn.Module, Configuration], Trainer]] = {"fsdp": _fsdp, "ddp": _ddp, "diloco": _diloco}
