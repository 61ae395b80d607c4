"""One rank of an FSDP2 run of the byte-level GPT: trains, counts bytes, hashes parameters, measures perplexity."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import model
import text
import torch
import torch.distributed as dist
from measure import mean_over_ranks, sent_bytes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_lowcomm as lc
from convergence import validation


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One run. `weights`, `gradients`, `master` and `learn_at` are `lc.fsdp.quantize`'s; on gloo, or with a group's `policy` in
    place of the call, they are unused. `width`, `layers` and `heads` are the model's, `validation_batches` what a rank reads
    for the perplexity.
    """

    backend: str = "lowcomm"
    weights: str = "none"
    gradients: str = "none"
    master: str = "fp32"
    learn_at: tuple[int, ...] | None = None
    policy: str = ""
    width: int = model.Config.width
    layers: int = model.Config.layers
    heads: int = model.Config.heads
    steps: int = 400
    seed: int = 0
    batch: int = 8
    lr: float = 1e-3
    hashed_steps: int = 0
    validation_batches: int = validation.BATCHES


def train(rank: int, init_method: str, *, world: int, configuration: Configuration) -> dict[str, Any]:
    """Trains one model; every value is this rank's own but `loss` and `perplexity`, which are means over ranks.

    Returns:
        Lists with an element a step, `loss`, `weights_bytes` and `gradients_bytes` (sent so far, frames included; 0 on
        gloo, which does not count), `seconds` (since the first step began), and hashes of the first `hashed_steps`,
        `shards` (this rank's parameters after the step) and `gathered` (all weights as the forward pass saw them); then
        `perplexity` on the validation text.
    """
    c = configuration
    options = lc.Options(policy=c.policy, min_bytes=0) if c.policy else None
    dist.init_process_group(c.backend, init_method=init_method, rank=rank, world_size=world, pg_options=options)
    torch.manual_seed(c.seed)
    shape = model.Config(width=c.width, layers=c.layers, heads=c.heads)
    gpt = model.GPT(shape)
    mesh = init_device_mesh("cpu", (world,))
    for block in gpt.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(gpt, mesh=mesh)
    if c.backend == "lowcomm" and not c.policy:
        lc.fsdp.quantize(gpt, weights=c.weights, gradients=c.gradients, master=c.master, learn_at=c.learn_at)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=c.lr, fused=True)
    corpus, context = text.load(), shape.context
    gathered, unwatch = watch_gathered(gpt)

    run: dict[str, Any] = {
        key: [] for key in ("loss", "weights_bytes", "gradients_bytes", "seconds", "shards", "gathered")
    }
    start = time.monotonic()
    for step in range(c.steps):
        gathered.clear()
        if step == c.hashed_steps:
            unwatch()
        loss = gpt(*corpus.batch(c.batch, context, seed=c.seed, step=step, rank=rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run["loss"].append(mean_over_ranks(loss))
        run["seconds"].append(time.monotonic() - start)
        run["weights_bytes"].append(sent_bytes("all_gather"))
        run["gradients_bytes"].append(sent_bytes("reduce_scatter"))
        if step < c.hashed_steps:
            run["shards"].append(digest(parameter.to_local() for parameter in gpt.parameters()))
            run["gathered"].append(hashlib.blake2b("".join(gathered).encode(), digest_size=16).hexdigest())
    run["perplexity"] = validation.perplexity(
        gpt, corpus, context, rank=rank, world=world, batches_a_rank=c.validation_batches
    )
    dist.destroy_process_group()
    return run


def digest(tensors: Iterable[Tensor]) -> str:
    """A hash of the tensors' bytes in order."""
    hasher = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        # A copy: a view by numpy would pin the storage, which FSDP2 resizes.
        hasher.update(tensor.detach().clone().numpy())
    return hasher.hexdigest()


def watch_gathered(gpt: model.GPT) -> tuple[list[str], Callable[[], None]]:
    """Hashes every layer's gathered weights in each forward pass, in order of use.

    Returns:
        The list that the hashes are appended to, and a function that ends this.
    """
    seen: list[str] = []

    def hook(module: nn.Module, _: object) -> None:
        seen.append(digest(module.parameters()))

    # FSDP2 put its own hook, which gathers, before these.
    layers = (gpt.embed, *gpt.blocks, gpt.norm, gpt.head)
    handles = [layer.register_forward_pre_hook(hook) for layer in layers]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return seen, end
