"""Snapshots of a machine of several ranks: the first rank has the whole weights, and the others get their shards of it."""

import json
from collections.abc import Sequence
from typing import Any

import torch

from torch_lowcomm._saved import packed, unpacked
from torch_lowcomm.seed_replay.machine_ranks import MachineRanks
from torch_lowcomm.seed_replay.shards import Entry, part_of, whole


def gathered(weights: dict[str, torch.Tensor], ranks: MachineRanks) -> dict[str, torch.Tensor]:
    """Returns whole weights in host memory on the first rank, and none on the others, one after another. Collective."""
    kept = {}
    for name, shard in weights.items():
        tensor = whole(shard)
        if ranks.first:
            kept[name] = tensor
    return kept


def scattered(
    saved: dict[str, Any], own: Sequence[Entry], parameters: Sequence[torch.Tensor], ranks: MachineRanks
) -> dict[str, Any]:
    """Returns the first rank's snapshot with this rank's shards in place of the weights. Collective.

    Args:
        saved: A snapshot; ranks other than the first may give anything.
        own: This rank's shards.
        parameters: The parameters that they are of.
        ranks: The machine's ranks.

    Raises:
        ValueError: The first rank's is no snapshot of such weights; all ranks raise it.
    """
    error = ""
    if ranks.first:
        error = _mistake(saved, own, parameters)
    error = json.loads(ranks.bytes_of_first(json.dumps(error).encode()))
    if error:
        raise ValueError(f"SeedReplay: snapshot: {error}")
    optimizer = unpacked(ranks.bytes_of_first(packed(saved["optimizer"]) if ranks.first else b""))
    weights = {}
    for (name, shard, _, first), parameter in zip(own, parameters, strict=True):
        if ranks.first:
            tensor = saved["weights"][name].to("cpu", shard.dtype).contiguous()
        else:
            tensor = torch.empty(parameter.shape, dtype=shard.dtype)
        weights[name] = part_of(ranks.tensor_of_first(tensor), first, shard).clone()
    return {"optimizer": optimizer, "weights": weights}


def _mistake(saved: dict[str, Any], own: Sequence[Entry], parameters: Sequence[torch.Tensor]) -> str:
    """Says what keeps a value from being a snapshot of these weights; nothing if it is one."""
    if not {"optimizer", "weights"} <= set(saved) or saved["weights"] is None:
        return f"expected one with optimizer and weights on the machine's first rank, got {sorted(saved)}"
    for (name, _, _, _), parameter in zip(own, parameters, strict=True):
        found = saved["weights"].get(name)
        if found is None or found.shape != parameter.shape:
            got = "none" if found is None else f"{tuple(found.shape)}"
            return f"expected {name!r} of shape {tuple(parameter.shape)}, got {got}"
    return ""
