"""Compressed gradients for DDP: coded, or of low rank with coded factors, with error feedback."""

import torch
import torch.distributed as dist

from torch_lowcomm.ddp.state import State

__all__ = ["State", "hook"]


# DDP compares these annotations with the types themselves: no `from __future__ import annotations` here.
def hook(state: State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket of gradients over the state's group; pass it to `register_comm_hook` with a `State`.

    It returns at once; ops of the next bucket are queued behind those of this one.

    Args:
        state: The state of this model.
        bucket: The bucket that DDP passes. A parameter in it that is not the state's model's, or does not fit a loaded state,
            is a ValueError.

    Returns:
        The future of the bucket's buffer, which then holds the averages. It fails where the group does.
    """
    if not isinstance(state, State):
        raise TypeError(f"ddp.hook: expected a torch_lowcomm.ddp.State, got {type(state).__name__}")
    return state.reduce(bucket)
