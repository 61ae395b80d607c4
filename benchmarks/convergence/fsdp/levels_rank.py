"""One rank of an FSDP2 run that learns levels: their error against even levels, and what learning costs of a step."""

from __future__ import annotations

import statistics
import time
from typing import Any

import model
import text
import torch
import torch.distributed as dist
from measure import mean_over_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_lowcomm as lc
from torch_lowcomm.fsdp.levels import Levels

# Its matrices have more than 100,000 elements, under which no levels are learned.
SHAPE = model.Config(width=256)
CODEC = "levels3:bucket=1024"


def train(rank: int, init_method: str, *, world: int, steps: int, batch: int) -> dict[str, Any]:
    """Trains one model whose levels are learned half-way.

    Returns:
        `weights` and `gradients`: [squared error of learned levels, of even ones] over this rank's shards of the tensors
        that learned, after the last step, the gradients being the reduced ones; `step_s` and `learning_s`: processor
        seconds of the median step and of all learning, which is done in one; `loss`, first and last.
    """
    dist.init_process_group("lowcomm", init_method=init_method, rank=rank, world_size=world)
    torch.manual_seed(0)
    gpt = model.GPT(SHAPE)
    mesh = init_device_mesh("cpu", (world,))
    for block in gpt.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(gpt, mesh=mesh)
    comms = lc.fsdp.quantize(gpt, weights=CODEC, gradients=CODEC, learn_at=(steps // 2,))
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3, fused=True)
    corpus = text.load()
    learning_s = time_learning()
    losses, step_s = [], []
    for step in range(steps):
        start = time.process_time()
        loss = gpt(*corpus.batch(batch, SHAPE.context, seed=0, step=step, rank=rank))
        loss.backward()
        optimizer.step()
        step_s.append(time.process_time() - start)
        losses.append(mean_over_ranks(loss))
        if step + 1 < steps:
            optimizer.zero_grad()
    state = comms.state_dict()
    weights = {name: p.to_local().detach() for name, p in gpt.named_parameters()}
    gradients = {name: p.grad.to_local() for name, p in gpt.named_parameters()}
    result = {
        "weights": squared_errors(weights, state, "weights"),
        "gradients": squared_errors(gradients, state, "gradients"),
        "step_s": statistics.median(step_s),
        "learning_s": sum(learning_s),
        "loss": [losses[0], losses[-1]],
    }
    dist.destroy_process_group()
    return result


def time_learning() -> list[float]:
    """Processor seconds of each time that levels are learned from now on, agreeing on them included."""
    seconds: list[float] = []
    learn, agreed = Levels._learn, Levels._agreed

    def timed(original: Any) -> Any:
        def run(*arguments: Any) -> Any:
            start = time.process_time()
            result = original(*arguments)
            seconds.append(time.process_time() - start)
            return result

        return run

    Levels._learn, Levels._agreed = timed(learn), timed(agreed)
    return seconds


def squared_errors(shards: dict[str, Tensor], state: dict[str, Any], what: str) -> list[float]:
    """[learned, even] over all tensors with learned levels."""
    codec, errors = lc.codec(CODEC), [0.0, 0.0]
    even = torch.linspace(0, 1, 2**codec.bits)
    for key in (key for key in state if key.startswith(what) and key.endswith(".levels")):
        for tensor, table in zip(state[key]["tensors"], state[key]["levels"], strict=True):
            shard = shards[tensor.split(" ")[0]]
            for i, levels in enumerate((table.contiguous(), even)):
                errors[i] += (codec.roundtrip(shard, table=levels) - shard).square().sum().item()
    return errors
