"""One rank of one step of four accumulated micro-batches: how often weights and gradients travel, and their bytes."""

from __future__ import annotations

import model
import text
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_lowcomm as lc

WEIGHTS, GRADIENTS = "minmax8:bucket=1024", "qsgd8:bucket=1024"
MICRO_BATCHES = 4


def exchanges(rank: int, init_method: str, *, world: int) -> dict[str, dict[str, float]]:
    """Runs one step as FSDP2 does by default and one that keeps weights after the backward pass, `kept`.

    Returns:
        For each: `gathers` and `reductions` of a group of parameters; `weights_bytes` and `gradients_bytes` sent in all, frames
        included, and `weights_payload` and `gradients_payload`, what FORMAT.md's formula gives for so many.
    """
    dist.init_process_group("lowcomm", init_method=init_method, rank=rank, world_size=world)
    found = {name: step(rank, world, kept=name == "kept") for name in ("default", "kept")}
    dist.destroy_process_group()
    return found


def step(rank: int, world: int, *, kept: bool) -> dict[str, float]:
    """One step on a fresh model, whose root frees its weights after the forward pass as its layers do."""
    torch.manual_seed(0)
    gpt = model.GPT()
    mesh = init_device_mesh("cpu", (world,))
    for block in gpt.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(gpt, mesh=mesh, reshard_after_forward=True)
    gpt.set_reshard_after_backward(not kept)
    lc.fsdp.quantize(gpt, weights=WEIGHTS, gradients=GRADIENTS)
    lc.reset_stats()
    corpus, context = text.load(), model.Config().context
    for k in range(MICRO_BATCHES):
        gpt.set_requires_gradient_sync(k + 1 == MICRO_BATCHES)
        gpt(*corpus.batch(2, context, seed=0, step=k, rank=rank)).backward()
    groups = (gpt, *gpt.blocks)
    for module in groups:
        module.reshard()
    ops = lc.stats()[dist.group.WORLD.group_name]
    result = {
        "gathers": ops["all_gather"]["calls"] / len(groups),
        "reductions": ops["reduce_scatter"]["calls"] / len(groups),
    }
    for op, what, spec in (("all_gather", "weights", WEIGHTS), ("reduce_scatter", "gradients", GRADIENTS)):
        result[f"{what}_bytes"] = ops[op]["wire_bytes"]
        result[f"{what}_payload"] = (world - 1) * ops[op]["calls"] / len(groups) * payload(gpt, spec)
    return result


def payload(gpt: model.GPT, spec: str) -> int:
    """Bytes of one message of every group: each parameter's shard by its codec, vectors as they are."""
    codecs = [lc.codec(spec if p.ndim > 1 else "none") for p in gpt.parameters()]
    shards = [p.to_local().numel() for p in gpt.parameters()]
    return sum(codec.encoded_bytes(n) for codec, n in zip(codecs, shards, strict=True))
