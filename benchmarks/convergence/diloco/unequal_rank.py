"""One site of `convergence diloco_unequal`: trains at a speed of its own until so many outer steps are made."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

import model
import text
import torch
import torch.distributed as dist

import torch_lowcomm as lc
from convergence.diloco.rank import SHAPE, outer_bytes
from convergence.training import perplexity


@dataclasses.dataclass(frozen=True)
class Sites:
    """A run of one rank a site. `outer`: what `lc.DiLoCoX` is given; `pace_s`: the least seconds of each site's inner step."""

    outer: Mapping[str, Any]
    pace_s: tuple[float, ...]
    outer_steps: int
    warm_up: int = 100
    seed: int = 0
    batch: int = 8
    lr: float = 1e-3


def train(rank: int, init_method: str, *, configuration: Sites) -> dict[str, Any]:
    """Trains one site's part.

    Returns:
        Lists with an element an outer step, from this site's clock and its own training: `seconds`, `step` (its inner steps),
        `bytes` (that it has sent), `loss` (training loss, the mean since the last one); and `validation`, the mean cross
        entropy of the outer parameters on the validation text.
    """
    c = configuration
    dist.init_process_group("lowcomm", init_method=init_method, rank=rank, world_size=len(c.pace_s))
    torch.manual_seed(c.seed)
    gpt, corpus = model.GPT(SHAPE), text.load()
    optimizer = lc.DiLoCoX(torch.optim.AdamW(gpt.parameters(), lr=c.lr, fused=True), model=gpt, **c.outer)
    run: dict[str, Any] = {"seconds": [], "step": [], "bytes": [], "loss": []}
    losses: list[float] = []
    step = 0
    dist.barrier()
    begun = time.monotonic()
    while len(run["step"]) < c.outer_steps:
        due = time.monotonic() + c.pace_s[rank]
        for group in optimizer.param_groups:
            group["lr"] = c.lr * min(1, (step + 1) / c.warm_up)
        loss = gpt(*corpus.batch(c.batch, SHAPE.context, seed=c.seed, step=step, rank=rank))
        loss.backward()
        time.sleep(max(0.0, due - time.monotonic()))
        optimizer.step(samples=c.batch)
        optimizer.zero_grad()
        step += 1
        losses.append(loss.item())
        if optimizer.report["outer_steps"] > len(run["step"]):
            run["seconds"].append(time.monotonic() - begun)
            run["step"].append(step)
            run["bytes"].append(outer_bytes())
            run["loss"].append(sum(losses) / len(losses))
            losses = []
    optimizer.finish()
    run["validation"] = math.log(perplexity(gpt, corpus, SHAPE.context, rank=rank, world=len(c.pace_s)))
    dist.destroy_process_group()
    return run
