"""One rank of a run that talks every so many steps: trains the byte-level GPT, counts bytes, measures the outer parameters."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import model
import text
import torch
import torch.distributed as dist
from measure import mean_over_ranks, reduced_bytes, sent_bytes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_lowcomm as lc
from convergence.diloco.cocktail import CocktailSGD
from convergence.diloco.muon import MuonAdamW
from convergence.training import perplexity

SHAPE = model.Config(width=96, layers=3)


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One run. `outer`: what `lc.DiLoCoX` is given; `cocktail`: what `CocktailSGD` is; with neither an exact
    all_reduce of gradients by DDP.
    """

    outer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    cocktail: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    muon: bool = False  # the inner optimizer of matrices, in place of AdamW
    ranks: int = 2
    steps: int = 600
    warm_up: int = 100
    seed: int = 0
    batch: int = 8
    lr: float = 1e-3


def train(rank: int, init_method: str, *, configuration: Configuration) -> dict[str, Any]:
    """Trains one model.

    Returns:
        Lists with an element a step: `loss` (of the ranks' own parameters, mean over ranks), `bytes` (sent so far, frames
        included) and `seconds`; `outer`, an element an outer step: {"step" (inner steps by then), "rank" and "sync_every"
        (r_t and H_t, which it ended with), "effective_rank"}; and `validation`, the mean cross entropy of the outer
        parameters on the validation text.
    """
    c = configuration
    dist.init_process_group("lowcomm", init_method=init_method, rank=rank, world_size=c.ranks)
    torch.manual_seed(c.seed)
    gpt = model.GPT(SHAPE)
    trained, optimizer, count = trainer(gpt, c)
    corpus = text.load()
    run: dict[str, Any] = {"loss": [], "bytes": [], "seconds": [], "outer": []}
    start = time.monotonic()
    for step in range(c.steps):
        for group in optimizer.param_groups:
            group["lr"] = c.lr * min(1, (step + 1) / c.warm_up)
        loss = trained(*corpus.batch(c.batch, SHAPE.context, seed=c.seed, step=step, rank=rank))
        loss.backward()
        before = optimizer.report["outer_steps"] if c.outer else 0
        optimizer.step()
        optimizer.zero_grad()
        if c.outer and (report := optimizer.report)["outer_steps"] > before:
            kept = {key: report[key] for key in ("rank", "sync_every", "effective_rank")}
            run["outer"].append({"step": step + 1, **kept})
        run["bytes"].append(count())
        run["loss"].append(mean_over_ranks(loss))
        run["seconds"].append(time.monotonic() - start)
    if c.outer or c.cocktail:
        optimizer.finish()
    run["bytes"][-1] = count()
    run["validation"] = math.log(perplexity(gpt, corpus, SHAPE.context, rank=rank, world=c.ranks))
    dist.destroy_process_group()
    return run


def trainer(gpt: nn.Module, c: Configuration) -> tuple[nn.Module, Any, Callable[[], int]]:
    """Wraps a model as a configuration says: the module to call, the optimizer to step (`finish()` ends it with `outer` or
    `cocktail`), and what counts the bytes that this rank has sent.
    """
    inner: torch.optim.Optimizer
    if c.muon:  # of the layers' matrices
        hidden = [p for name, p in gpt.named_parameters() if name.startswith("blocks") and p.ndim == 2]
        others = [p for p in gpt.parameters() if not any(p is matrix for matrix in hidden)]
        muon = torch.optim.Muon(hidden, lr=c.lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        inner = MuonAdamW(muon, torch.optim.AdamW(others, lr=c.lr))
    else:
        inner = torch.optim.AdamW(gpt.parameters(), lr=c.lr, fused=True)
    if c.outer:
        return gpt, lc.DiLoCoX(inner, model=gpt, **c.outer), outer_bytes
    if c.cocktail:
        return gpt, CocktailSGD(inner, **c.cocktail), reduced_bytes
    return DistributedDataParallel(gpt), inner, reduced_bytes


def outer_bytes() -> int:
    """Returns the bytes that this rank has sent in outer steps, frames included."""
    return sent_bytes("outer_step")
