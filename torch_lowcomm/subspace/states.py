"""State dicts of stages: parts of the whole decoder's, which another cut takes."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch


def merge_states(states: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Puts the state dicts of all stages of a cut together to that of the decoder, for stages of another cut to load.

    A stage's `load_state_dict` picks its own part of it. Two stages with other values under one name are a ValueError.
    """
    merged: dict[str, torch.Tensor] = {}
    for number, state in enumerate(states):
        for name, value in state.items():
            if name in merged and not torch.equal(merged[name], value):
                raise ValueError(
                    f"{name}: expected the same on all stages that have it, got another value in state {number}"
                )
            merged[name] = value
    return merged


def expect_free_blocks(module: Any, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Refuses a state dict of a decoder that has another number of free blocks; a hook of constrained decoders."""
    basis, saved = getattr(module, "subspace_basis", None), state.get(f"{prefix}subspace_basis._extra_state")
    if basis is None or saved is None:
        return
    free = int(saved[1]) if saved.numel() > 1 else 0  # states from before there were free blocks
    if free != basis.free_blocks:
        raise ValueError(
            f"free_blocks: expected the state of a decoder with free_blocks={basis.free_blocks}, as this one was constrained, "
            f"got one with free_blocks={free}: load it into lc.subspace.constrain(..., free_blocks={free})"
        )


def pick(stage: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Removes from a state dict that is being loaded what other stages have; a hook of `StageModule`. Refuses one without the
    stage's blocks, of a decoder that was cut elsewhere.
    """
    expect_free_blocks(stage, state, prefix)
    parts, mine = stage.subspace_parts, stage.block_numbers
    block = re.compile(re.escape(f"{prefix}{parts.blocks}.") + r"(\d+)\.")
    there = {int(match[1]) for name in state if (match := block.match(name))}
    if not set(mine) <= there:
        raise ValueError(
            f"{stage.name} has blocks {blocks_text(mine)}, the state dict has {blocks_text(there)}: the decoder was cut "
            f"elsewhere; give it the states of all stages, put together by lc.subspace.merge_states"
        )
    own = {f"{prefix}{name}" for name in stage.state_dict()}
    paths = [
        path for path in (parts.embedding, parts.positions, parts.norm, parts.head, "boundaries") if path is not None
    ]
    for name in list(state):
        match = block.match(name)
        other = int(match[1]) not in mine if match else any(f"{name}.".startswith(f"{prefix}{path}.") for path in paths)
        if other and name not in own:
            del state[name]


def blocks_text(blocks: Iterable[int]) -> str:
    """Numbers of blocks in a sentence: 2...5."""
    numbers = sorted(blocks)
    if not numbers:
        return "none"
    whole = numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 1
    return f"{numbers[0]}...{numbers[-1]}" if whole else ", ".join(map(str, numbers))
