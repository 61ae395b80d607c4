"""One rank's part of the runs of `convergence aq` and `aq_replicas`: a stage of a byte GPT's pipeline, or of one of its replicas.

The runs of a seed follow one another in the same processes and begin with the same weights. Samples come back, or are fresh ones.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time
from collections.abc import Iterator
from typing import Any

import model
import text
import torch
import torch.distributed as dist
from stages import Part, loss_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import Schedule1F1B

import torch_lowcomm as lc

WIDTH, CONTEXT = model.Config().width, model.Config().context
PRETRAIN_LR = 1e-3
EVERY = 4  # steps from one outer step of DiLoCoX to the next
KINDS = ("forward", "backward", "announcements", "replicas", "other")  # of bytes


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One run. `codecs` are options of lc.pipeline.Stage; without any its messages are exact.

    Attributes:
        store: Of the cache; "": there is none.
        replicas: Of the pipeline; each has a part of the samples, and `batch` of them a step.
        optimizer: What averages a stage over its replicas: "adamw" gradients, exactly; "quantized_adam" gradients in 4 bits;
            "diloco" the parameters, in 4 bits every EVERY steps.
        point: Steps of a point of the curves; 0: an epoch's.
        validation: Windows.
        watched: Of them those that are evaluated at each point.
        width: Of the decoder, which has two blocks then and heads of 64; 0: the benchmark's own.
    """

    codecs: dict[str, Any] = dataclasses.field(default_factory=dict)
    store: str = ""
    stages: int = 4
    replicas: int = 1
    micro_batches: int = 4
    pretrain: int = 300
    samples: int = 256
    epochs: int = 12
    batch: int = 16
    lr: float = 3e-4
    point: int = 0
    validation: int = 512
    watched: int = 128
    width: int = 0
    optimizer: str = "adamw"
    seed: int = 0

    @property
    def sizes(self) -> model.Config:
        """The decoder's."""
        return model.Config(width=self.width, layers=2, heads=self.width // 64) if self.width else model.Config()

    @property
    def epoch_steps(self) -> int:
        """Steps of an epoch, of each replica."""
        return self.samples // self.batch // self.replicas


def train(rank: int, init_method: str, *, configurations: list[Configuration]) -> list[dict[str, Any]]:
    """Does one run after another; all have the same `stages`, `replicas` and `seed`.

    Returns:
        Of each run, by point: `seconds`, and of this rank's messages `sent`, whose figures are sums over what `counted()` has;
        `elements` that crossed a boundary in each direction; `caches`: the rows of its boundaries, and `cache_bytes`. On the
        last stage also `loss` by point, by the run's own messages. By exact messages `validations` by point, and of the trained
        weights `samples` and `validation`: mean cross entropy (nats) of the first samples, and of others that are not trained on.
    """
    first = configurations[0]
    world = first.replicas * first.stages
    dist.init_process_group("lowcomm", init_method=init_method, rank=rank, world_size=world)
    mesh = None
    if first.replicas > 1:
        mesh = init_device_mesh("cpu", (first.replicas, first.stages), mesh_dim_names=("replica", "stage"))
    weights: dict[tuple[int, int], model.GPT] = {}
    runs = []
    for c in configurations:
        if (c.pretrain, c.width) not in weights:
            weights[c.pretrain, c.width] = pretrained(rank, c)
        runs.append(Run(c, rank % c.stages, copy.deepcopy(weights[c.pretrain, c.width]), mesh).result())
    dist.destroy_process_group()
    return runs


def pretrained(rank: int, c: Configuration) -> model.GPT:
    """The whole model after `pretrain` steps on random windows, which rank 0 makes. Collective."""
    torch.manual_seed(c.seed)
    gpt = model.GPT(c.sizes)
    if rank == 0:
        optimizer = torch.optim.AdamW(gpt.parameters(), lr=PRETRAIN_LR, fused=True)
        corpus = text.load()
        for step in range(c.pretrain):
            gpt(*corpus.batch(c.batch * c.replicas, CONTEXT, seed=c.seed, step=step, rank=0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for parameter in gpt.parameters():
        dist.broadcast(parameter.data, 0)
    return gpt


class Run:
    """One run on this rank, which has the stage `rank` of its replica; `mesh` has the groups where there are several."""

    def __init__(self, c: Configuration, rank: int, gpt: model.GPT, mesh: DeviceMesh | None) -> None:
        self.c, self.rank, self.last = c, rank, rank == c.stages - 1
        self.replica, self.among = 0, None
        group = dist.group.WORLD
        if mesh:
            self.replica, self.among, group = (
                mesh.get_local_rank("replica"),
                mesh.get_group("replica"),
                mesh.get_group("stage"),
            )
        self.stage_group = group.group_name
        self.module = Part(gpt, rank, c.stages)
        self.cache = lc.pipeline.Cache(store=c.store) if c.store else None
        device = torch.device("cpu")
        self.stage = lc.pipeline.Stage(self.module, rank, c.stages, device, group=group, cache=self.cache, **c.codecs)
        self.schedule = Schedule1F1B(self.stage, n_microbatches=c.micro_batches, loss_fn=loss_of)
        parameters = list(self.module.parameters())
        self.optimizer: Any = torch.optim.AdamW(parameters, lr=c.lr, fused=True)
        if c.optimizer == "quantized_adam":
            self.optimizer = lc.QuantizedAdam(parameters, lr=c.lr, warmup_steps=c.epoch_steps, group=self.among)
        elif c.optimizer == "diloco":
            self.optimizer = lc.DiLoCoX(self.optimizer, EVERY, mesh=mesh, mode="sync", codec="sym4:bucket=128")
        self.corpus = text.load()
        self.tokens, self.targets = self.corpus.batch(c.samples, CONTEXT, seed=c.seed, step=0, rank=1)

    def result(self) -> dict[str, Any]:
        """Trains, and returns what train() does of one run."""
        c, point = self.c, self.c.point or self.c.epoch_steps
        result: dict[str, Any] = {"loss": [], "sent": [], "seconds": [], "validations": []}
        start = time.monotonic()
        losses: list[float] = []
        lc.reset_stats()
        dataset = list(zip(self.tokens, self.targets, strict=True))
        for step, batch in enumerate(self.batches(dataset)):
            losses.append(self.step(*batch))
            if (step + 1) % point == 0:
                result["loss"].append(statistics.mean(losses[-point:]))
                result["sent"].append(self.counted())
                stopped = time.monotonic()
                result["seconds"].append(stopped - start)
                result["validations"].append(self.validated(c.watched))
                start += time.monotonic() - stopped
                lc.reset_stats()
        if self.c.optimizer == "diloco":
            self.optimizer.finish()
        result["elements"] = len(losses) * c.batch * CONTEXT * c.sizes.width  # of a boundary, in each direction
        result["caches"] = self.rows()
        result["parameters"] = sum(parameter.numel() for parameter in self.module.parameters())
        result["cache_bytes"] = self.cache.bytes if self.cache else 0
        first = (part[: c.validation].split(c.batch) for part in (self.tokens, self.targets))
        result["samples"] = self.exactly(zip(*first, strict=True))
        result["validation"] = self.validated(c.validation)
        return result

    def validated(self, count: int) -> float:
        """As exactly(), of so many windows that are not trained on, equal for all runs."""
        batch = self.c.batch
        return self.exactly(self.corpus.validation_batch(batch, CONTEXT, i) for i in range(count // batch))

    def batches(self, dataset: list[tuple[Tensor, Tensor]]) -> Iterator[tuple[Any, ...]]:
        """The numbered batches of this replica in all epochs."""
        c = self.c
        options = {"replica": self.replica, "replicas": c.replicas} if c.replicas > 1 else {}
        return lc.pipeline.batches(dataset, batch=c.batch, seed=c.seed, epochs=c.epochs, **options)

    def step(self, samples: Tensor, tokens: Tensor, targets: Tensor) -> float:
        """One step of the optimizer; the loss, which the last stage alone knows."""
        losses: list[Tensor] = []
        numbers = {"samples": samples} if self.cache else {}
        lc.pipeline.step(self.schedule, tokens, target=targets, losses=losses, **numbers)
        if self.among and self.c.optimizer == "adamw":
            for parameter in self.module.parameters():
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, group=self.among)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean().item() if self.last else 0.0

    def counted(self) -> dict[str, float]:
        """What this rank has sent since the counters were cleared, and what its caches saw of activations sent as changes.

        Returns:
            Bytes, frames included, of `forward` and `backward` messages, of `announcements` of receives, of what goes between
            `replicas` (of gloo's ops the values alone), and `other` ones: torch's inference of shapes, and comparisons of caches;
            `exact`, those of all of them but announcements that are not coded. `mean_value` of |a| and `mean_change` of |a - m|.
        """
        found = dict.fromkeys((*KINDS, "exact"), 0.0)
        for group, ops in lc.stats().items():
            for op, figures in ops.items():
                kind = next((way for way in ("forward", "backward") if op.startswith(f"send {way} boundary")), "other")
                kind = "announcements" if op.startswith("recv ") else kind
                kind = kind if group == self.stage_group else "replicas"
                bytes_sent = (figures["wire_bytes"] or 0) + figures["inner_bytes"]
                found[kind] += bytes_sent
                if kind != "announcements" and figures["exact_calls"] == figures["calls"]:
                    found["exact"] += bytes_sent
                samples = figures["samples"] or {"mean_value": None}
                if kind == "forward" and samples["mean_value"]:
                    found |= {name: samples[name] for name in ("mean_value", "mean_change")}
        return found

    def exactly(self, batches: Any) -> float:
        """Mean loss of batches by exact messages, without the cache; known to the last stage."""
        losses: list[Tensor] = []
        for tokens, targets in batches:
            of_batch: list[Tensor] = []  # torch empties the list at each call
            lc.pipeline.evaluate(self.schedule, tokens, target=targets, losses=of_batch)
            losses += of_batch
        return torch.stack(losses).mean().item() if losses else 0.0

    def rows(self) -> dict[str, list[list[int]]]:
        """What the cache has of each boundary of this rank, as Slots.rows()."""
        if self.cache is None:
            return {}
        sides = {"received": (self.rank - 1, False), "sent": (self.rank, True)}
        return {name: self.cache.slots.rows(boundary, sends).tolist() for name, (boundary, sends) in sides.items()}
