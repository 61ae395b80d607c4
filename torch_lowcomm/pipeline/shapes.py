"""The shapes that torch's stages tell each other before their first micro-batch, as numbers of a message."""

import importlib
from typing import Any

import torch

from torch_lowcomm._saved import packed, unpacked

MOST = 1 << 20  # bytes; a description of a tensor takes some 1,500
_MODULES = {
    "torch.distributed.pipelining._utils": ("_TensorMeta", "_DTensorMeta", "_StageForwardMeta", "_StageBackwardMeta"),
    "torch.distributed.tensor.placement_types": ("Shard", "Replicate", "Partial", "_StridedShard"),
    "torch.distributed._mesh_layout": ("_MeshLayout",),
}


def to_numbers(shapes: Any) -> torch.Tensor:
    """An object of torch's that describes tensors, as int64 [bytes]."""
    return torch.tensor(list(packed(shapes)), dtype=torch.int64)


def room_for(size: int) -> torch.Tensor:
    """int64 [size] for numbers that a peer has announced; refuses more than shapes can have."""
    if not 0 < size <= MOST:
        raise ValueError(f"shapes: expected 1...{MOST} bytes, got {size}")
    return torch.empty(size, dtype=torch.int64)


def of_numbers(numbers: torch.Tensor) -> Any:
    """The object again. Nothing else can be made of what a peer sends: torch reads its own descriptions of tensors alone."""
    there = torch.serialization.get_safe_globals()  # which the context would take away at its end
    with torch.serialization.safe_globals([found for found in _classes() if found not in there]):
        try:
            return unpacked(bytes(numbers.tolist()))
        except Exception as error:
            raise ValueError(f"shapes: expected a description of tensors, got another object: {error}") from None


def _classes() -> list[Any]:
    """Those that this torch has."""
    found = []
    for module, names in _MODULES.items():
        try:
            there = importlib.import_module(module)
        except ImportError:
            continue
        found += [getattr(there, name) for name in names if hasattr(there, name)]
    return found
