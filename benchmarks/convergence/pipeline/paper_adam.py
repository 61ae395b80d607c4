"""QuantizedAdam as its papers have it (1-bit Adam, arXiv 2102.02888, Algorithm 1, in 4 bits): the codes are those of momenta.

`lc.QuantizedAdam` codes momenta over √v̂. What the codes of both sides lose is added to the next step's. Ranks exchange decoded
values; bytes are those that their codes have.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

import torch_lowcomm as lc


class PaperAdam:
    """Of the replicas of a stage, with a step and options as `lc.QuantizedAdam`.

    Attributes:
        coded_bytes: That this rank has sent to others in codes, since it was cleared: its part of a sum's slices, and its slice.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        warmup_steps: int,
        group: dist.ProcessGroup,
        codec: str = "sym4:bucket=512",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        self.parameters = list(parameters)
        self.lr, self.warmup_steps, self.group, self.codec = lr, warmup_steps, group, lc.codec(codec)
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.sizes = [parameter.numel() for parameter in self.parameters]
        # Momentum, second moment, and what the codes have lost of this rank's part and of the sum.
        self.m, self.v, self.own, self.summed = (torch.zeros(sum(self.sizes)) for _ in range(4))
        self.steps, self.coded_bytes = 0, 0.0

    @torch.no_grad()
    def step(self) -> None:
        """Adam's step by the exact average of gradients, or after the warm-up by the average of coded momenta."""
        (beta1, beta2), self.steps = self.betas, self.steps + 1
        gradient = torch.cat([parameter.grad.flatten() for parameter in self.parameters])
        if self.steps <= self.warmup_steps:
            dist.all_reduce(gradient, dist.ReduceOp.AVG, group=self.group)
            self.m = beta1 * self.m + (1 - beta1) * gradient
            self.v = beta2 * self.v + (1 - beta2) * gradient.square()
        else:
            mine = beta1 * self.m + (1 - beta1) * gradient + self.own
            sent = self.codec.roundtrip(mine)
            self.own = mine - sent
            dist.all_reduce(sent, dist.ReduceOp.AVG, group=self.group)
            whole = sent + self.summed
            self.m = self.codec.roundtrip(whole)
            self.summed = whole - self.m
            world = dist.get_world_size(self.group)
            self.coded_bytes += 2 * (world - 1) / world * self.codec.encoded_bytes(len(whole))
        # A v that the warm-up has not moved would be divided by eps for ever: as lc.QuantizedAdam's, a tensor's least v.
        least = torch.cat([(1 - beta2) * v.mean().expand(len(v)) for v in self.v.split(self.sizes)])
        v = (self.v if self.steps <= self.warmup_steps else torch.maximum(self.v, least)) / (
            1 - beta2 ** min(self.steps, self.warmup_steps)
        )
        change = self.lr * self.m / (1 - beta1**self.steps) / (v.sqrt() + self.eps)
        for parameter, part in zip(self.parameters, change.split(self.sizes), strict=True):
            parameter -= self.lr * self.weight_decay * parameter + part.view_as(parameter)

    def zero_grad(self) -> None:
        """As torch's."""
        for parameter in self.parameters:
            parameter.grad = None
