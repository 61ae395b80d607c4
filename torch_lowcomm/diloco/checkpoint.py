"""Packs an outer loop's state for a checkpoint: what ranks share, what belongs to one rank, and what varies in shape."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch

from torch_lowcomm._checksum import checksum, expect_checksum


def saved(inner: dict[str, Any]) -> bytes:
    """Returns an inner optimizer's state_dict as the bytes that `packed` takes."""
    content = io.BytesIO()
    torch.save(inner, content)
    return content.getvalue()


def packed(
    state: Mapping[str, torch.Tensor], inner: bytes, *, shared: str, own: str, by_clock: bool = False
) -> dict[str, Any]:
    """Packs the state of a loop and its inner optimizer, for `torch.save` or torch.distributed.checkpoint.

    The result has the form of an optimizer's state. torch.distributed.checkpoint.state_dict replaces numbers of parameters by
    names in "state" and "params" and leaves the rest as it is; both are empty here. In "state" the inner optimizer's moments
    would have the same names on all ranks, and a checkpoint would keep those of one rank only.

    Args:
        state: Return value of `_C.DiLoCoX.state()`.
        inner: Return value of `saved`.
        shared: Key for the tensors that are equal on all ranks of the group.
        own: Key for the tensors of this rank.
        by_clock: Whether ranks of the group count inner steps of their own, as with `sync_seconds`.

    Returns:
        {"state": {}, "param_groups": [{"params": [], shared: …, own: …}]}.
    """
    equal: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    varying: dict[str, Any] = {}
    for name, tensor in state.items():
        if name.startswith("own."):
            kept[name.removeprefix("own.")] = tensor
        else:
            (varying if _varies(name) or (by_clock and _counts_steps(name)) else equal)[name] = tensor
    content = io.BytesIO()
    steps = {"outer_steps": int(state["outer_steps"]), "steps": int(state["steps"])}
    torch.save({"outer": varying, **steps, "shared_crc": checksum(equal)}, content)
    mine: dict[str, Any] = {"outer": kept, "packed": content.getvalue(), "inner": inner}
    parts = {shared: equal, own: {**mine, "crc": checksum(mine)}}
    return {"state": {}, "param_groups": [{"params": [], **parts}]}


def unpacked(state_dict: Mapping[str, Any], *, shared: str, own: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Unpacks what `packed` returned.

    Returns:
        (the tensors that `_C.DiLoCoX.load` takes, the inner optimizer's state_dict).

    Raises:
        ValueError: A part is missing, the two parts are of different steps, or anything else than what was saved.
    """
    groups = state_dict.get("param_groups") or [{}]
    parts = {key: value for key, value in groups[0].items() if key != "params"}
    for key in (shared, own):
        if key not in parts:
            raise ValueError(
                f"DiLoCoX: load_state_dict: expected {key!r}, got {sorted(parts)}: each rank loads its own"
            )
    mine = {key: value for key, value in parts[own].items() if key != "crc"}
    expect_checksum("DiLoCoX", mine, parts[own].get("crc"))
    content = torch.load(io.BytesIO(mine["packed"]), weights_only=True)
    unit = "steps" if "steps" in parts[shared] else "outer_steps"
    shared_steps = parts[shared].get(unit)
    # As where rank 0's state is broadcast to ranks that have none.
    if isinstance(shared_steps, torch.Tensor) and content[unit] != int(shared_steps):
        raise ValueError(
            f"DiLoCoX: load_state_dict: expected {own!r} of {'inner' if unit == 'steps' else 'outer'} step {int(shared_steps)}, "
            f"as {shared!r}, got one of {content[unit]}: each rank loads its own"
        )
    expect_checksum("DiLoCoX", parts[shared], content["shared_crc"])
    kept = {f"own.{name}": tensor for name, tensor in mine["outer"].items()}
    return {**parts[shared], **content["outer"], **kept}, torch.load(io.BytesIO(mine["inner"]), weights_only=True)


def _counts_steps(name: str) -> bool:
    """Whether a state tensor counts inner steps: the run's, or those to a fragment's next message."""
    return name == "steps" or (name.startswith("fragment") and name.removeprefix("fragment").isdigit())


def _varies(name: str) -> bool:
    """Whether the shape of a state tensor changes between outer steps; distributed checkpoints need fixed shapes."""
    return name == "effective_ranks" or name.endswith(".factor")
