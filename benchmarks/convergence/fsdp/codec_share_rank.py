"""One rank of an FSDP2 run that computes more than it waits: which share of a step its codecs take."""

from __future__ import annotations

import statistics
import time

import model
import text
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_lowcomm as lc


def train(rank: int, init_method: str, *, world: int, steps: int, batch: int) -> dict[str, float]:
    """Trains the base model at W8G8, buckets of 1024, one thread for computing and the group's for codes.

    Returns:
        `codec_s`, seconds of encoding and decoding in a step, and `step_s`, of the step: medians over the steps after the
        first two.
    """
    dist.init_process_group("lowcomm", init_method=init_method, rank=rank, world_size=world)
    torch.manual_seed(0)
    gpt = model.GPT()
    mesh = init_device_mesh("cpu", (world,))
    for block in gpt.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(gpt, mesh=mesh)
    lc.fsdp.quantize(gpt, weights="minmax8:bucket=1024", gradients="qsgd8:bucket=1024")
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3, fused=True)
    corpus, context = text.load(), model.Config().context
    codec_s, step_s = [], []
    for step in range(steps):
        lc.reset_stats()
        start = time.monotonic()
        gpt(*corpus.batch(batch, context, seed=0, step=step, rank=rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        step_s.append(time.monotonic() - start)
        ops = lc.stats()[dist.group.WORLD.group_name].values()
        codec_s.append(sum(op["encode_s"] + op["decode_s"] for op in ops))
    dist.destroy_process_group()
    return {"codec_s": statistics.median(codec_s[2:]), "step_s": statistics.median(step_s[2:])}
