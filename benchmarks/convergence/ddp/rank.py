"""One rank of a DDP run of the byte-level GPT: trains with one of the hooks, counts bytes, measures perplexity."""

from __future__ import annotations

import dataclasses
from typing import Any

import model
import text
import torch
import torch.distributed as dist
from measure import reduced_bytes
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import torch_lowcomm as lc
from convergence import training


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One run. Without a codec: exact, or, with a factor rank, torch's PowerSGD hook, whose factors are float32."""

    codec: str = ""
    projection_codec: str = ""
    factor_rank: int = 0
    warm_up_steps: int = 0
    steps: int = 500
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
            use_error_feedback=True,
            warm_start=True,
        )
        ddp.register_comm_hook(peer, powerSGD_hook.powerSGD_hook)
    optimizer, context = torch.optim.AdamW(gpt.parameters(), lr=c.lr, fused=True), model.Config().context
    run: dict[str, Any] = {"loss": [], "bytes": [], "seconds": []}
    for loss, seconds in training.steps(ddp, optimizer, c, rank=rank, context=context):
        run["bytes"].append(reduced_bytes())
        run["loss"].append(loss)
        run["seconds"].append(seconds)
    run["perplexity"] = training.perplexity(gpt, text.load(), context, rank=rank, world=world)
    dist.destroy_process_group()
    return run
