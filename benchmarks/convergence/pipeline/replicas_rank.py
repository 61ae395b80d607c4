"""One rank's part of the runs of `convergence aq_replicas`: a stage of one of two replicas of the byte GPT's pipeline."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import model
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torch_lowcomm as lc
from convergence.pipeline import rank as one_pipeline
from convergence.pipeline.paper_adam import PaperAdam
from convergence.pipeline.rank import Configuration

EVERY = 4  # steps from one outer step of DiLoCoX to the next


@dataclasses.dataclass(frozen=True)
class ReplicasConfiguration(Configuration):
    """One run; `batch` is of a replica.

    Attributes:
        optimizer: What averages a stage over its replicas: "adamw" gradients, exactly; "quantized_adam" gradients in 4 bits;
            "paper_adam" as its papers have it; "diloco" the parameters, in 4 bits every EVERY steps.
    """

    stages: int = 2
    replicas: int = 2
    batch: int = 8
    samples: int = 512
    epochs: int = 8
    optimizer: str = "adamw"


def train(rank: int, init_method: str, *, configurations: list[ReplicasConfiguration]) -> list[dict[str, Any]]:
    """Does one run after another; all have the same replicas, stages, seed and pretraining.

    Returns:
        As rank.train(); `sent` has, by epoch, bytes of `forward` and `backward` messages, of `announcements`, of what goes
        between `replicas`, and `other` ones, and `exact`, those of all of them that are not coded.
    """
    c = configurations[0]
    dist.init_process_group("lowcomm", init_method=init_method, rank=rank, world_size=c.replicas * c.stages)
    mesh = init_device_mesh("cpu", (c.replicas, c.stages), mesh_dim_names=("replica", "stage"))
    gpt = one_pipeline.pretrained(rank, c)
    runs = [ReplicaRun(c, mesh, copy.deepcopy(gpt)).result() for c in configurations]
    dist.destroy_process_group()
    return runs


class ReplicaRun(one_pipeline.Run):
    """One run on this rank."""

    c: ReplicasConfiguration

    def __init__(self, c: ReplicasConfiguration, mesh: DeviceMesh, gpt: model.GPT) -> None:
        super().__init__(c, mesh.get_local_rank("stage"), gpt, mesh.get_group("stage"))
        self.replica, self.among = mesh.get_local_rank("replica"), mesh.get_group("replica")
        self.stage_group = mesh.get_group("stage").group_name
        parameters = list(self.module.parameters())
        if c.optimizer in ("quantized_adam", "paper_adam"):
            kind = lc.QuantizedAdam if c.optimizer == "quantized_adam" else PaperAdam
            self.optimizer = kind(parameters, lr=c.lr, warmup_steps=c.epoch_steps, group=self.among)
        else:
            self.optimizer = torch.optim.AdamW(parameters, lr=c.lr, fused=True)
        if c.optimizer == "diloco":
            self.optimizer = lc.DiLoCoX(self.optimizer, EVERY, mesh=mesh, mode="sync", codec="sym4:bucket=128")

    def batches(self, dataset: list[tuple[Tensor, Tensor]]) -> Iterator[tuple[Any, ...]]:
        """The numbered batches of this replica; with shuffle="global" slots move between replicas."""
        c = self.c
        moves = {"cache": self.cache, "group": self.among} if c.shuffle == "global" and self.cache else {}
        return lc.pipeline.batches(
            dataset,
            batch=c.batch,
            seed=c.seed,
            epochs=c.epochs,
            shuffle=c.shuffle,
            replica=self.replica,
            replicas=c.replicas,
            **moves,
        )

    def step(self, samples: Tensor, tokens: Tensor, targets: Tensor) -> float:
        """As Run.step(), with gradients averaged over replicas by whoever is to."""
        losses: list[Tensor] = []
        numbers = {"samples": samples} if self.cache else {}
        lc.pipeline.step(self.schedule, tokens, target=targets, losses=losses, **numbers)
        if self.c.optimizer == "adamw":
            for parameter in self.module.parameters():
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, group=self.among)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean().item() if self.last else 0.0

    def end(self) -> None:
        """Applies the last outer step."""
        if isinstance(self.optimizer, lc.DiLoCoX):
            self.optimizer.finish()

    def counted(self) -> dict[str, float]:
        """Bytes of all groups by kind, frames included; of what gloo carries, its values alone; of PaperAdam, as it counts."""
        found = dict.fromkeys(("forward", "backward", "announcements", "replicas", "other", "exact"), 0.0)
        coded = 0.0
        if isinstance(self.optimizer, PaperAdam):
            coded, self.optimizer.coded_bytes = self.optimizer.coded_bytes, 0.0
        for group, ops in lc.stats().items():
            for op, figures in ops.items():
                kind = next((way for way in ("forward", "backward") if op.startswith(f"send {way} boundary")), "other")
                kind = "announcements" if op.startswith("recv ") else kind
                kind = kind if group == self.stage_group else "replicas"
                if kind == "replicas" and coded:
                    continue
                bytes_sent = (figures["wire_bytes"] or 0) + figures["inner_bytes"]
                found[kind] += bytes_sent
                if kind != "announcements" and figures["exact_calls"] == figures["calls"]:
                    found["exact"] += bytes_sent
                samples = figures["samples"] or {"mean_value": None}
                if kind == "forward" and samples["mean_value"]:
                    found |= {name: samples[name] for name in ("mean_value", "mean_change")}
        found["replicas"] += coded
        return found
