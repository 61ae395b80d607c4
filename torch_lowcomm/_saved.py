"""States as the bytes that `torch.save` writes."""

import io
from typing import Any

import torch


def packed(value: Any) -> bytes:
    """Returns a value as bytes."""
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def unpacked(data: bytes) -> Any:
    """Returns what `packed` was given; tensors and plain values, nothing that would run code."""
    return torch.load(io.BytesIO(data), weights_only=True)
