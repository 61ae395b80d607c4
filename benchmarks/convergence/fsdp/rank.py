"""One rank of an FSDP2 run of the byte-level GPT: trains, counts bytes, hashes parameters, measures perplexity."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import model
import text
import torch
import torch.distributed as dist
from measure import sent_bytes
from torch import Tensor, nn

import torch_lowcomm as lc
from convergence import training


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One run.

    Attributes:
        weights, gradients, master, learn_at: Of `lc.fsdp.quantize`; unused on gloo, or with a group's `policy` in place of it.
        width, layers, heads: Of the model.
        hashed_steps: The first steps, of which parameters are hashed.
        validation_batches: That a rank reads for the perplexity.
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
    validation_batches: int = training.BATCHES


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
    gpt = training.sharded(model.GPT(shape), world)
    if c.backend == "lowcomm" and not c.policy:
        lc.fsdp.quantize(gpt, weights=c.weights, gradients=c.gradients, master=c.master, learn_at=c.learn_at)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=c.lr, fused=True)
    gathered, unwatch = watch_gathered(gpt)
    run: dict[str, Any] = {
        key: [] for key in ("loss", "weights_bytes", "gradients_bytes", "seconds", "shards", "gathered")
    }
    for loss, seconds in training.steps(gpt, optimizer, c, rank=rank, context=shape.context):
        run["loss"].append(loss)
        run["seconds"].append(seconds)
        run["weights_bytes"].append(sent_bytes("all_gather"))
        run["gradients_bytes"].append(sent_bytes("reduce_scatter"))
        if len(run["loss"]) <= c.hashed_steps:
            run["shards"].append(digest(parameter.to_local() for parameter in gpt.parameters()))
            run["gathered"].append(hashlib.blake2b("".join(gathered).encode(), digest_size=16).hexdigest())
        if len(run["loss"]) >= c.hashed_steps:
            unwatch()
        gathered.clear()
    run["perplexity"] = training.perplexity(
        gpt, text.load(), shape.context, rank=rank, world=world, batches_a_rank=c.validation_batches
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


def watch_gathered(gpt: nn.Module) -> tuple[list[str], Callable[[], None]]:
    """Hashes every layer's gathered weights in each forward pass, in order of use: the list of hashes, and what ends this."""
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
