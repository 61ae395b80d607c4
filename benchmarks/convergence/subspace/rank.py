"""One rank's part of the runs of `convergence subspace`: a stage of a byte GPT, trained from its first weights."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import model
import text
import torch
import torch.distributed as dist
from stages import loss_of
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe

import torch_lowcomm as lc
from convergence.subspace.rounded import OneBit, TopK, Whole

CONTEXT = model.Config().context
POINT = 20  # steps whose mean loss is a point of a curve


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One run; fields that are not here are as `lc.subspace.cut` and `constrain` have them.

    Attributes:
        kind: "constrained" decoders; free ones with boundaries "whole", "top-k" and "one-bit".
        rank: Numbers a token that cross a boundary; of "top-k" those that are kept.
        watched: Windows of the `validation` ones that are evaluated at each point; 0: none.
    """

    kind: str
    rank: int = 0
    coefficients: str = "fp32"
    fixed: str = "signs"
    sigma: float | None = None
    free_blocks: int = 1
    width: int = 256
    layers: int = 6
    stages: int = 6
    micro_batches: int = 4
    batch: int = 8
    steps: int = 500
    lr: float = 1e-3
    validation: int = 256
    watched: int = 0
    seed: int = 0


def train(rank: int, init_method: str, *, configurations: list[Configuration]) -> list[dict[str, Any]]:
    """Does one run after another; all have as many stages.

    Returns:
        Of each run: `sent`, bytes of messages, frames included, and `seconds`, by point of the curve. On the last rank also
        `loss`, the mean training loss (nats a byte) by point, and of text that is not trained on `validation`, and `validations`
        by point.
    """
    dist.init_process_group("lowcomm", init_method=init_method, rank=rank, world_size=configurations[0].stages)
    runs = [Run(c, rank).result() for c in configurations]
    dist.destroy_process_group()
    return runs


class Run:
    """One run on this rank."""

    def __init__(self, c: Configuration, rank: int) -> None:
        self.c, self.last = c, rank == c.stages - 1
        torch.manual_seed(c.seed)
        gpt = model.GPT(model.Config(width=c.width, layers=c.layers))
        nn.init.normal_(gpt.embed.weight, std=0.1)
        self.boundary = boundary_of(c)
        if self.boundary is None:
            options: dict[str, Any] = {"free_blocks": c.free_blocks, "fixed": c.fixed, "sigma": c.sigma}
            gpt = lc.subspace.constrain(gpt, c.rank, seed=c.seed, **options)
        self.module = lc.subspace.cut(gpt, rank, c.stages, coefficients=c.coefficients, boundary=self.boundary)
        self.stage = lc.pipeline.Stage(self.module, rank, c.stages, torch.device("cpu"))
        self.schedule = ScheduleGPipe(self.stage, n_microbatches=c.micro_batches, loss_fn=loss_of)
        self.optimizer: torch.optim.Optimizer
        if self.boundary is None:
            self.optimizer = lc.SubspaceAdamW(self.module, lr=c.lr)
        else:
            self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=c.lr, fused=True)
        self.corpus = text.load()

    def result(self) -> dict[str, Any]:
        """Trains, and returns what train() does of one run."""
        c = self.c
        result: dict[str, Any] = {"loss": [], "sent": [], "seconds": [], "validations": []}
        lc.reset_stats()
        start, losses = time.monotonic(), []
        for step in range(c.steps):
            losses.append(self.step(*self.corpus.batch(c.batch, CONTEXT, seed=c.seed, step=step, rank=0)))
            if (step + 1) % POINT == 0:
                result["loss"].append(sum(losses) / len(losses))
                result["sent"].append(sum(result["sent"][-1:]) + sent())
                result["seconds"].append((stopped := time.monotonic()) - start)
                losses = []
                if c.watched:
                    result["validations"].append(self.validation(c.watched))
                lc.reset_stats()
                start += time.monotonic() - stopped
        result["validation"] = self.validation(c.validation)
        return result

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """One step of the optimizer; the loss, which the last stage alone knows."""
        losses: list[Tensor] = []
        lc.pipeline.step(self.schedule, tokens, target=targets, losses=losses, ids=tokens)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean().item() if self.last else 0.0

    def validation(self, windows: int) -> float:
        """Mean loss on text that is not trained on; codecs of messages are left out. Known to the last stage."""
        losses: list[Tensor] = []
        for i in range(windows // self.c.batch):
            tokens, targets = self.corpus.validation_batch(self.c.batch, CONTEXT, i)
            of_batch: list[Tensor] = []  # torch empties the list at each call
            lc.pipeline.evaluate(self.schedule, tokens, target=targets, losses=of_batch, ids=tokens)
            losses += of_batch
        return torch.stack(losses).mean().item() if self.last else 0.0


def boundary_of(c: Configuration) -> Any:
    """The boundary of a free decoder's stages; None: the decoder is constrained."""
    if c.kind == "constrained":
        return None
    if c.kind == "top-k":
        return TopK(c.width, c.rank)
    return OneBit(c.width) if c.kind == "one-bit" else Whole(c.width)


def sent() -> float:
    """Bytes of this rank's activations and gradients since the counters were cleared, frames included."""
    (ops,) = lc.stats().values()
    return float(
        sum(
            figures["wire_bytes"] or 0
            for op, figures in ops.items()
            if op.startswith(("send forward", "send backward"))
        )
    )
