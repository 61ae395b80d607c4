"""The shapes that torch's stages tell each other before their first micro-batch, as numbers of a message."""

from __future__ import annotations

import importlib
import io
from typing import Any

import torch

_MODULES = {
    "torch.distributed.pipelining._utils": ("_TensorMeta", "_DTensorMeta", "_StageForwardMeta", "_StageBackwardMeta"),
    "torch.distributed.tensor.placement_types": ("Shard", "Replicate", "Partial", "_StridedShard"),
    "torch.distributed._mesh_layout": ("_MeshLayout",),
}


def to_numbers(shapes: Any) -> torch.Tensor:
    """An object of torch's that describes tensors, as int64 [bytes]."""
    file = io.BytesIO()
    torch.save(shapes, file)
    return torch.tensor(list(file.getvalue()), dtype=torch.int64)


def of_numbers(numbers: torch.Tensor) -> Any:
    """The object again. Nothing else can be made of what a peer sends: torch reads its own descriptions of tensors alone.

    Raises:
        Exception: The numbers are of another object; torch names it (`UnpicklingError`).
    """
    with torch.serialization.safe_globals(_classes()):
        return torch.load(io.BytesIO(bytes(numbers.tolist())), weights_only=True)


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
