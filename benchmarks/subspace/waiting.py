"""A decoder whose blocks take the time of larger ones: each waits as a host does whose accelerator computes."""

from __future__ import annotations

from typing import Any

import model
import torch
from pipelines.compute import Sleep
from torch import Tensor, nn


class Waiting(nn.Module):
    """A block of a constrained decoder that waits for so many seconds a token, forwards and backwards, and hardly computes.

    Its attention output and its down projection have one input, the mean of a token's numbers, so that whatever looks at a
    decoder finds the parts of one.
    """

    def __init__(self, width: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.token_s = forward_s, backward_s
        self.compute = Sleep(1, 0.0, 0.0)
        self.attention = nn.Module()
        self.attention.out = nn.Linear(1, width, bias=False)
        self.down = nn.Linear(1, width, bias=False)

    def forward(self, x: Tensor, cache: Any = None, start: int = 0) -> Tensor:
        """[batch, time, width] → the same shape; nothing is remembered of tokens before."""
        tokens = x.shape[0] * x.shape[1]
        self.compute.forward_s, self.compute.backward_s = (seconds * tokens for seconds in self.token_s)
        h = self.compute(x.mean(-1, keepdim=True))
        return x + self.attention.out(h) + self.down(h)


class Decoder(nn.Module):
    """Bytes → logits through blocks that wait."""

    def __init__(self, width: int, blocks: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(model.VOCABULARY, width)
        self.blocks = nn.ModuleList(Waiting(width, forward_s, backward_s) for _ in range(blocks))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, model.VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, time] → [batch, time, vocabulary]."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def decoder(width: int, blocks: int, token_s: tuple[float, float] | None, *, context: int) -> nn.Module:
    """A free decoder, the same on every rank: of blocks that wait, or of a GPT's where `token_s` is None."""
    torch.manual_seed(0)
    if token_s is not None:
        made: nn.Module = Decoder(width, blocks, *token_s)
    else:
        made = model.GPT(model.Config(width=width, layers=blocks, heads=max(1, width // 64), context=context))
    nn.init.normal_(made.embed.weight, std=0.1)
    return made
