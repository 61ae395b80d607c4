"""One rank of a DDP run of the byte-level GPT: trains with one of the hooks, counts bytes, measures perplexity."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import model
import text
import torch
import torch.distributed as dist
from measure import mean_over_ranks, reduced_bytes
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import torch_lowcomm as lc
from convergence.validation import perplexity


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One run. Without a codec: exact, or, with a factor rank, torch's PowerSGD hook, whose factors are float32."""

    codec: str = ""
    projection_codec: str = ""
    factor_rank: int = 0
    error_feedback: bool = True
    warm_up_steps: int = 0
    steps: int = 400
    seed: int = 0
    batch: int = 8
    lr: float = 1e-3


def train(rank: int, init_method: str, *, world: int, configuration: Configuration) -> dict[str, Any]:
    """Trains one model.

    Returns:
        Lists with an element a step: `loss` (mean over ranks), `bytes` (sent in all_reduces so far, as
        `measure.reduced_bytes` counts them) and `seconds` (since the first step began); then `perplexity` on the
        validation text.
    """
    c = configuration
    dist.init_process_group("lowcomm", init_method=init_method, rank=rank, world_size=world)
    torch.manual_seed(c.seed)
    gpt = model.GPT()
    ddp = DistributedDataParallel(gpt, bucket_cap_mb=100)  # one bucket: PowerSGD's hook on gloo's ops takes no more
    if c.codec:
        state = lc.ddp.State(
            codec=c.codec,
            rank=c.factor_rank or None,
            projection_codec=c.projection_codec or None,
            error_feedback=c.error_feedback,
            warm_up_steps=c.warm_up_steps,
            model=gpt,
        )
        ddp.register_comm_hook(state, lc.ddp.hook)
    elif c.factor_rank:
        peer = powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=c.factor_rank,
            start_powerSGD_iter=c.warm_up_steps,
            min_compression_rate=1,  # as ours: whatever is smaller as factors
            use_error_feedback=c.error_feedback,
            warm_start=True,
        )
        ddp.register_comm_hook(peer, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=c.lr, fused=True)
    corpus, context = text.load(), model.Config().context
    run: dict[str, Any] = {"loss": [], "bytes": [], "seconds": []}
    start = time.monotonic()
    for step in range(c.steps):
        loss = ddp(*corpus.batch(c.batch, context, seed=c.seed, step=step, rank=rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run["bytes"].append(reduced_bytes())
        run["loss"].append(mean_over_ranks(loss))
        run["seconds"].append(time.monotonic() - start)
    run["perplexity"] = perplexity(gpt, corpus, context, rank=rank, world=world)
    dist.destroy_process_group()
    return run
