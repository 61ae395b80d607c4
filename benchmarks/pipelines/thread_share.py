"""How much of a stage's compute its messages take of the thread that trains: encoding, decoding, the cache, Python.

Two stages on loopback, of one block of a byte-level GPT each, 1024 channels wide. The training thread's processor time is
counted, so that waiting for a link is no part of it.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from datetime import timedelta
from typing import Any

import launch
import model
import torch
import torch.distributed as dist

import torch_lowcomm as lc
from pipelines.cases import MICRO_BATCHES
from pipelines.compute import Block

CONFIG = model.Config(width=1024, heads=16, layers=1, context=128)
WAYS = {"exact": ("", "", False), "gauss4, gauss4": ("gauss4", "gauss4", False)}
WAYS |= {"changes gauss2, gauss4": ("gauss2", "gauss4", True)}
WARM_UP = 2
_DEADLINE_S = 300


@dataclasses.dataclass(frozen=True)
class Row:
    """Processor seconds of one micro-batch on one stage's training thread, medians over steps; each stage has two messages."""

    name: str
    stage: int
    compute_s: float
    messages_s: float

    @property
    def share(self) -> float:
        """Of its two messages in its compute."""
        return self.messages_s / self.compute_s


class TimedStage(lc.pipeline.Stage):
    """A stage that counts the processor time of its messages, and of all that it computes."""

    messages_s = compute_s = 0.0
    _inside = False

    def _count(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        if self._inside:
            return call(*args, **kwargs)
        self._inside, start = True, time.thread_time()
        try:
            return call(*args, **kwargs)
        finally:
            self._inside = False
            self.messages_s += time.thread_time() - start

    def _compute(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        start, before = time.thread_time(), self.messages_s
        try:
            return call(*args, **kwargs)
        finally:
            self.compute_s += time.thread_time() - start - (self.messages_s - before)

    def _wait(self, messages: Any) -> None:
        self._count(super()._wait, messages)

    def get_fwd_recv_ops(self, *args: Any) -> Any:
        """Posts."""
        return self._count(super().get_fwd_recv_ops, *args)

    def get_fwd_send_ops(self, *args: Any) -> Any:
        """Sends."""
        return self._count(super().get_fwd_send_ops, *args)

    def get_bwd_recv_ops(self, *args: Any) -> Any:
        """Posts."""
        return self._count(super().get_bwd_recv_ops, *args)

    def get_bwd_send_ops(self, *args: Any) -> Any:
        """Sends."""
        return self._count(super().get_bwd_send_ops, *args)

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Waits and computes."""
        return self._compute(super().forward_one_chunk, *args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Waits and computes."""
        return self._compute(super().backward_one_chunk, *args, **kwargs)


def run(rank: int, init_method: str, *, steps: int) -> list[dict[str, Any]]:
    """One stage: a row a way."""
    timeout = timedelta(seconds=_DEADLINE_S)
    dist.init_process_group("lowcomm", init_method=init_method, rank=rank, world_size=2, timeout=timeout)
    x = torch.randn(MICRO_BATCHES, CONFIG.context, CONFIG.width, generator=torch.Generator().manual_seed(0))
    ways = {}
    for name, (forward, backward, cached) in WAYS.items():
        torch.manual_seed(rank)
        cache = lc.pipeline.Cache() if cached else None
        stage = TimedStage(
            Block(CONFIG), rank, 2, torch.device("cpu"), forward=forward or None, backward=backward or None, cache=cache
        )
        schedule = lc.pipeline.Schedule1F1B(stage, MICRO_BATCHES, loss_fn=lambda y, _: y.square().mean())
        ways[name] = (stage, schedule, torch.optim.SGD(stage.submod.parameters(), lr=1e-3), [])
    for step in range(WARM_UP + steps):
        for stage, schedule, optimizer, seconds in ways.values():
            stage.messages_s = stage.compute_s = 0.0
            samples = {} if stage.cache is None else {"samples": range(MICRO_BATCHES)}
            lc.pipeline.step(schedule, x, target=x, **samples)
            optimizer.step()
            optimizer.zero_grad()
            if step >= WARM_UP:
                seconds.append((stage.compute_s / MICRO_BATCHES, stage.messages_s / MICRO_BATCHES))
    dist.destroy_process_group()
    medians = {name: tuple(map(statistics.median, zip(*way[3], strict=True))) for name, way in ways.items()}
    return [{"name": name, "stage": rank, "compute_s": c, "messages_s": m} for name, (c, m) in medians.items()]


def measure(steps: int = 5) -> list[Row]:
    """Rows by way, the first stage's before the last one's."""
    first, last = launch.run(run, ranks=2, deadline_s=_DEADLINE_S, steps=steps)
    return [Row(**row) for both in zip(first, last, strict=True) for row in both]
