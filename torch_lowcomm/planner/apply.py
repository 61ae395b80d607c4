"""Carries out a way of a plan, and compares the first 100 steps with it."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from torch_lowcomm import ddp, fsdp
from torch_lowcomm._log import logger
from torch_lowcomm.diloco import DiLoCoX
from torch_lowcomm.planner.link import Link
from torch_lowcomm.planner.measure import blocks_of
from torch_lowcomm.planner.training import Training
from torch_lowcomm.planner.ways import Way
from torch_lowcomm.summary import summary

METHODS = ("ddp", "fsdp", "diloco")
_STEPS, _OFF = 100, 1.2


def apply(
    training: Training, link: Link, way: Way, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[nn.Module, Any]:
    """See `Plan.apply`."""
    if way.method not in METHODS:
        raise ValueError(f"plan: apply: expected a way that needs no stages, got {way.name!r}; paste:\n{way.lines}")
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if count != training.parameters or dist.get_world_size() != link.ranks:
        raise ValueError(
            f"plan: apply: expected the planned model of {training.parameters} parameters on {link.ranks} ranks, got "
            f"{count} parameters on {dist.get_world_size()}"
        )
    if way.method == "fsdp":
        if optimizer is not None:
            raise ValueError("plan: apply: expected no optimizer for FSDP2, which replaces the parameters, got one")
        for block in blocks_of(model):
            fully_shard(block)
        fully_shard(model)
        if way.options:
            fsdp.quantize(model, **way.options)
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    wrapped: Any = optimizer
    if way.method == "diloco":
        wrapped = DiLoCoX(optimizer, model=model, **way.options)
    elif way.method == "ddp":
        ddp_model = DistributedDataParallel(model)
        if way.options:
            ddp_model.register_comm_hook(ddp.State(model=model, **way.options), ddp.hook)
        model = ddp_model
    if dist.get_rank() == 0:
        _Follower(training.step_s, way.step_s, optimizer)
    return model, wrapped


class _Follower:
    """Times the optimizer's steps, and logs once how they compare with the plan; the first ten do not count."""

    def __init__(self, computing_s: float, planned_s: float, optimizer: torch.optim.Optimizer) -> None:
        self._computing_s, self._planned_s, self._calls = computing_s, planned_s, 0
        self._handle = optimizer.register_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        self._calls += 1
        if self._calls == _STEPS // 10:
            self._start, self._before = time.perf_counter(), _spent()
        if self._calls == _STEPS + _STEPS // 10:
            self._handle.remove()
            found = (time.perf_counter() - self._start) / _STEPS
            spent = [(after - before) / _STEPS for after, before in zip(_spent(), self._before, strict=True)]
            logger.log(*comparison(found, self._planned_s, self._computing_s, *spent))


def _spent() -> tuple[float, float]:
    """Seconds that ops have waited and coded so far."""
    ops = summary().ops.values()
    return sum(of["wait_s"] for of in ops), sum(of["encode_s"] + of["decode_s"] for of in ops)


def comparison(found: float, planned: float, computing: float, waiting: float, coding: float) -> tuple[int, str]:
    """The level and the text of what is logged, of seconds a step: found and planned, planned computing, and spent in ops."""
    text = f"plan: a step takes {found:.3g} s, planned {planned:.3g} s"
    if max(found / planned, planned / found) <= _OFF:
        return logging.INFO, text
    parts = {
        "waiting for other ranks": (waiting, max(planned - computing, 0.0)),
        "computing and coding": (max(found - waiting, 0.0), computing),
    }
    cause, (is_, was) = max(parts.items(), key=lambda part: abs(part[1][0] - part[1][1]))
    return logging.WARNING, f"{text}: {cause} takes {is_:.3g} s, planned {was:.3g} (of it coding {coding:.3g})"
