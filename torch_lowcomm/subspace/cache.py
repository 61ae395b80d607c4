"""The keys and values of the positions that a block has seen, for decoders written by hand."""

from __future__ import annotations

import torch


class KeyValues:
    """The keys and values that the attention of one block remembers while it generates.

    A block takes it as `forward(x, cache=, start=)`: `start` positions came before x's first, and attention goes over

        k, v = cache.append(k, v)

    so that query i of x sees the keys 0...start + i.
    """

    def __init__(self) -> None:
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds those of new positions; returns those of all, [batch, heads, positions, head width]."""
        if self._keys is not None and self._values is not None:
            keys = torch.cat((self._keys, keys), dim=2)
            values = torch.cat((self._values, values), dim=2)
        self._keys, self._values = keys, values
        return keys, values
