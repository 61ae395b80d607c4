"""A byte-level GPT: pre-RMSNorm, rotary positions, no biases; 0.82 M parameters at its base size.

x = embed(bytes);  x += attention(norm(x));  x += mlp(norm(x))  (4 times);  logits = head(norm(x))
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 128  # data.py clamps bytes over 127


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a `GPT`."""

    width: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 64


class Attention(nn.Module):
    """Causal multi-head attention with rotary position embeddings."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        half = config.width // config.heads // 2
        frequency = 10000.0 ** (-torch.arange(half) / half)
        angle = torch.outer(torch.arange(config.context), frequency)  # (context, half)
        self.register_buffer("cosine", angle.cos(), persistent=False)
        self.register_buffer("sine", angle.sin(), persistent=False)

    def rotate(self, x: Tensor, start: int = 0) -> Tensor:
        """Turns each pair (x1, x2) of a head by its position's angle; x is (batch, heads, time, head width) from `start` on."""
        cosine, sine = self.cosine[start : start + x.shape[2]], self.sine[start : start + x.shape[2]]
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((x1 * cosine - x2 * sine, x1 * sine + x2 * cosine), dim=-1)

    def forward(self, x: Tensor, cache: Any = None, start: int = 0) -> Tensor:
        """(batch, time, width) → the same shape.

        `cache` has the keys and values of the `start` positions before x; its append(k, v) adds x's and returns all.
        """
        batch, time, width = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = self.rotate(q, start), self.rotate(k, start)
        if cache is not None:
            k, v = cache.append(k, v)
        if start == 0:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:  # query i sees the keys of 0...start + i
            seen = torch.ones(time, start + time, dtype=torch.bool, device=x.device).tril(start)
            y = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """One transformer layer: the unit that FSDP2 shards, gathers and frees."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor, cache: Any = None, start: int = 0) -> Tensor:
        """(batch, time, width) → the same shape; cache and start as in Attention."""
        x = x + self.attention(self.attention_norm(x), cache, start)
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Predicts the next byte at every position."""

    def __init__(self, config: Config | None = None) -> None:
        super().__init__()
        config = config or Config()
        self.embed = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy in nats a byte of targets after tokens, both (batch, time) int64."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
