"""Carries out a way of a plan, and compares the first steps with it."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torch_lowcomm import ddp, fsdp
from torch_lowcomm._log import logger
from torch_lowcomm.diloco import DiLoCoX
from torch_lowcomm.live.account import note
from torch_lowcomm.planner.link import Link
from torch_lowcomm.planner.measure import blocks_of
from torch_lowcomm.planner.training import Training
from torch_lowcomm.planner.ways import Way
from torch_lowcomm.summary import summary

METHODS, _STEPS, _OFF = ("ddp", "fsdp", "diloco"), 100, 1.2


def apply(
    training: Training, link: Link, way: Way, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[nn.Module, Any]:
    """See `Plan.apply`."""
    if way.method not in METHODS:
        raise ValueError(f"plan: apply: expected a way of DDP, FSDP2 or DiLoCo, got {way.name!r}; paste:\n{way.lines}")
    parameters = [p for p in model.parameters() if p.requires_grad]
    if (count := sum(p.numel() for p in parameters)) != training.parameters or dist.get_world_size() != link.ranks:
        raise ValueError(
            f"plan: apply: expected the planned model of {training.parameters} parameters on {link.ranks} ranks, got "
            f"{count} parameters on {dist.get_world_size()}"
        )
    if isinstance(model, DistributedDataParallel) or any(isinstance(p, DTensor) for p in parameters):
        raise ValueError("plan: apply: expected the model by itself, got one under DDP or FSDP2")
    optimizer = optimizer or torch.optim.AdamW(parameters)
    if way.method == "fsdp":
        if optimizer.state or len(optimizer.param_groups) > 1:
            raise ValueError("plan: apply: FSDP2: expected an optimizer of one group and without a step, got another")
        for block in blocks_of(model)[1]:
            fully_shard(block)
        fully_shard(model)
        if way.options:
            fsdp.quantize(model, **way.options)
        optimizer.param_groups[0]["params"] = [p for p in model.parameters() if p.requires_grad]
    wrapped: Any = optimizer
    if way.method == "diloco":
        options = dict(way.options)
        if link.ranks_per_site > 1:
            shape = (link.sites, link.ranks_per_site)
            options["mesh"] = mesh = init_device_mesh("cpu", shape, mesh_dim_names=("sites", "replicas"))
            inside = mesh.get_group("replicas")
            model = DistributedDataParallel(model, process_group=inside, find_unused_parameters=training.unused)
        wrapped = DiLoCoX(optimizer, model=model, **options)
    elif way.method == "ddp":
        model = DistributedDataParallel(model, find_unused_parameters=training.unused)
        if way.options:
            model.register_comm_hook(ddp.State(model=model, **way.options), ddp.hook)
    if dist.get_rank() == 0:
        _Follower(training.step_s, way, optimizer)
    return model, wrapped


class _Follower:
    """Times 100 steps, or two outer ones, and logs once how they compare with the plan; as many first ones do not count."""

    def __init__(self, computing_s: float, way: Way, optimizer: torch.optim.Optimizer) -> None:
        self._computing_s, self._planned_s, self._way, self._calls = computing_s, way.step_s, way.name, 0
        self._steps = max(_STEPS, 2 * way.options.get("sync_every", 0))
        self._handle = optimizer.register_step_post_hook(self._stepped)
        note("plan", way=way.name, planned_s_a_step=way.step_s, measured_s_a_step=f"after {2 * self._steps} steps")

    def _stepped(self, *_: Any) -> None:
        self._calls += 1
        if self._calls == self._steps:
            self._start, self._before = time.perf_counter(), _spent()
        if self._calls == 2 * self._steps:
            self._handle.remove()
            found = (time.perf_counter() - self._start) / self._steps
            spent = [(after - before) / self._steps for after, before in zip(_spent(), self._before, strict=True)]
            note("plan", way=self._way, planned_s_a_step=self._planned_s, measured_s_a_step=found)
            logger.log(*comparison(found, self._planned_s, self._computing_s, *spent))


def _spent() -> tuple[float, float]:
    """Seconds that ops have waited and coded so far."""
    found = summary()
    return found.wait_s, found.coding_s


def comparison(found: float, planned: float, computing: float, waiting: float, coding: float) -> tuple[int, str]:
    """The level and the text of what is logged, of seconds a step: found, planned, planned computing, and of ops."""
    text = (
        f"plan: a step takes {found:.3g} s, planned {planned:.3g}; its ops wait {waiting:.3g} s for other ranks, planned "
        f"{max(planned - computing, 0):.3g}, and code {coding:.3g} s"
    )
    return logging.WARNING if max(found / planned, planned / found) > _OFF else logging.INFO, text
