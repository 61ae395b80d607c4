"""Stages of a GPT for torch's pipelining, and their loss."""

from __future__ import annotations

import model
from torch import Tensor, nn
from torch.nn import functional


class Part(nn.Module):
    """Some neighbouring blocks of a GPT, with its embedding in the first part and its head in the last."""

    def __init__(self, gpt: model.GPT, index: int, count: int) -> None:
        super().__init__()
        blocks = list(gpt.blocks)
        self.embed = gpt.embed if index == 0 else None
        self.blocks = nn.ModuleList(blocks[index * len(blocks) // count : (index + 1) * len(blocks) // count])
        self.norm, self.head = (gpt.norm, gpt.head) if index == count - 1 else (None, None)

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        """Tokens or activations → activations or logits; `ids` are for stages that need the tokens."""
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats a byte."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
