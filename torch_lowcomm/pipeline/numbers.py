"""Channels of numbers that the two sides of a boundary tell each other next to its tensors."""

from collections.abc import Iterable

import torch

from torch_lowcomm import _C


def list_of(samples: Iterable[int] | torch.Tensor) -> list[int]:
    """Numbers of samples; those of a tensor on a device take one copy."""
    return [int(sample) for sample in (samples.tolist() if isinstance(samples, torch.Tensor) else samples)]


def channel_of_numbers(
    backend: _C.LowcommBackend, peer: int, number: int, *, edge: str, part: str = ""
) -> _C.BoundaryChannel:
    """A channel whose messages are exact int64, and are not remembered.

    Args:
        backend: Of the group.
        peer: The other side's rank.
        number: The channel's.
        edge: Names it in errors and statistics.
        part: Goes on with the name.
    """
    return _C.BoundaryChannel(
        backend, peer, number, dtype=torch.int64, codec="", first="", channels=1, memory=None, edge=edge, part=part
    )
