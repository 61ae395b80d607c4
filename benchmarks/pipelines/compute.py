"""Stages to time: one that sleeps, as a host does whose accelerator computes, and one that computes."""

from __future__ import annotations

import time
from typing import Any

import model
import torch
from torch import Tensor, nn


def wait_until(end: float) -> None:
    """Sleeps until a time of time.perf_counter()."""
    while (left := end - time.perf_counter()) > 0:
        time.sleep(left)


class _Scaled(torch.autograd.Function):
    """x · weight, which takes as long as it is told to, forwards and backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stage: Sleep) -> Tensor:
        end = time.perf_counter() + stage.forward_s
        ctx.save_for_backward(x, weight)
        ctx.stage = stage
        y = x * weight
        wait_until(end)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, None]:
        (gradient,) = gradients
        end = time.perf_counter() + ctx.stage.backward_s
        x, weight = ctx.saved_tensors
        of_x = gradient * weight if ctx.needs_input_grad[0] else None
        of_weight = (gradient * x).flatten(0, -2).sum(0)
        wait_until(end)
        return of_x, of_weight, None


class Sleep(nn.Module):
    """A stage of one weight a channel, of activations [..., channels], that sleeps in place of computing, for the times of a
    larger one.
    """

    def __init__(self, channels: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        """Activations → activations."""
        return _Scaled.apply(x, self.weight, self)


class Block(nn.Module):
    """A stage that computes: a block of a byte-level GPT, for as long as the core takes."""

    def __init__(self, config: model.Config) -> None:
        super().__init__()
        self.block = model.Block(config)

    def forward(self, x: Tensor) -> Tensor:
        """Activations → activations."""
        return self.block(x) + 0.0


@torch.no_grad()
def move(stage: nn.Module, generator: torch.Generator) -> None:
    """Changes the weights as an optimizer's step does, so that activations change from visit to visit."""
    for weight in stage.parameters():
        weight += 0.01 * weight.square().mean().sqrt() * torch.randn(weight.shape, generator=generator)
        weight.grad = None


def loss(y: Tensor, _: Tensor) -> Tensor:
    """Of the last stage."""
    return y.square().mean()


def alone(stage: nn.Module, x: Tensor, *, last: bool, **inputs: Any) -> tuple[float, float]:
    """Seconds of a forward and of a backward of a stage by itself, of the last one with its loss."""
    start = time.perf_counter()
    y = stage(x.requires_grad_(x.is_floating_point()), **inputs)
    result = loss(y, y) if last else y
    forward_s = time.perf_counter() - start
    gradient = None if last else torch.ones_like(y)
    start = time.perf_counter()
    torch.autograd.backward(result, gradient)
    backward_s = time.perf_counter() - start
    stage.zero_grad()
    return forward_s, backward_s
