"""The byte GPT cut into stages: each block is two layers, so that four blocks make 2, 4 or 8 stages of equal length."""

from __future__ import annotations

import model
from torch import Tensor, nn


class AttentionLayer(nn.Module):
    """The first half of a block: x + attention(norm(x)), of (batch, time, width)."""

    def __init__(self, block: model.Block) -> None:
        super().__init__()
        self.norm, self.attention = block.attention_norm, block.attention

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) → the same shape."""
        return x + self.attention(self.norm(x))


class MlpLayer(nn.Module):
    """The second half of a block: x + mlp(norm(x)), of (batch, time, width)."""

    def __init__(self, block: model.Block) -> None:
        super().__init__()
        self.norm, self.up, self.down = block.mlp_norm, block.up, block.down

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) → the same shape."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Head(nn.Module):
    """Logits of the last activations, of each token or of all tokens' mean."""

    def __init__(self, gpt: model.GPT, pooled: bool) -> None:
        super().__init__()
        self.norm, self.head, self.pooled = gpt.norm, gpt.head, pooled

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) → (batch, time, vocabulary), or pooled (batch, vocabulary)."""
        x = self.norm(x)
        return self.head(x.mean(1) if self.pooled else x)


def part(gpt: model.GPT, index: int, count: int, *, pooled: bool = False) -> nn.Sequential:
    """Stage `index` of `count`: tokens or activations (batch, time, width) → activations or logits.

    The first one has the embedding, the last one the head: of each token, or `pooled`, where the first logits are classes'.
    Parameters are those of `gpt`, not copies.
    """
    layers = [half for block in gpt.blocks for half in (AttentionLayer(block), MlpLayer(block))]
    begin, end = (place * len(layers) // count for place in (index, index + 1))
    first = [gpt.embed] if index == 0 else []
    last = [Head(gpt, pooled)] if index == count - 1 else []
    return nn.Sequential(*first, *layers[begin:end], *last)
