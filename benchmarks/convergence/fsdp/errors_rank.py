"""One rank of an FSDP2 run whose levels are learned as it trains: what learned and even levels lose of the same tensors."""

from __future__ import annotations

from typing import Any

import model
import text
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_lowcomm as lc

WEIGHTS, GRADIENTS = "levels5:bucket=1024", "levels4:bucket=1024"  # the paper's bits


def train(
    rank: int, init_method: str, *, world: int, steps: int, every: int, learn_at: tuple[int, ...], shape: dict[str, int]
) -> dict[str, Any]:
    """Trains one model.

    Returns:
        `step`, how many were done at each measurement, one `every` few steps; and for `weights` and `gradients` by tensor a
        list next to it of [squared error of learned levels, of even ones, squared norm] over this rank's shard. Weights are
        those that the step began with, gradients the reduced ones, of the tensors whose levels are learned.
    """
    dist.init_process_group("lowcomm", init_method=init_method, rank=rank, world_size=world)
    torch.manual_seed(0)
    size = model.Config(**shape)
    gpt = model.GPT(size)
    mesh = init_device_mesh("cpu", (world,))
    for block in gpt.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(gpt, mesh=mesh)
    comms = lc.fsdp.quantize(gpt, weights=WEIGHTS, gradients=GRADIENTS, learn_at=learn_at)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3, fused=True)
    corpus = text.load()
    found: dict[str, Any] = {"step": [], "weights": {}, "gradients": {}}
    for step in range(steps):
        gpt(*corpus.batch(8, size.context, seed=0, step=step, rank=rank)).backward()
        if (step + 1) % every == 0:
            found["step"].append(step + 1)
            state, named = comms.state_dict(), dict(gpt.named_parameters())
            for what, codec in (("weights", WEIGHTS), ("gradients", GRADIENTS)):
                for name, levels in learned_levels(state, what):
                    tensor = named[name] if what == "weights" else named[name].grad
                    lost = losses(tensor.to_local().detach(), codec, levels)
                    found[what].setdefault(name, []).append(lost)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
    return found


def learned_levels(state: dict[str, Any], what: str) -> list[tuple[str, Tensor]]:
    """(name of a parameter, its levels now) of a state of `lc.fsdp.quantize`."""
    tables = [state[key] for key in state if key.startswith(what) and key.endswith(".levels")]
    return [
        (tensor.split(" ")[0], levels.contiguous())
        for table in tables
        for tensor, levels in zip(table["tensors"], table["levels"], strict=True)
    ]


def losses(shard: Tensor, codec: str, levels: Tensor) -> list[float]:
    """[squared error with these levels, with even ones, squared norm]."""
    coder = lc.codec(codec)
    errors = [coder.roundtrip(shard, table=table) - shard for table in (levels, torch.linspace(0, 1, 2**coder.bits))]
    return [part.square().sum().item() for part in (*errors, shard)]
