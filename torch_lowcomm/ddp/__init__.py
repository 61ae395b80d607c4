"""DDP's gradients by few bits: coded, or of low rank with coded factors, with error feedback.

model = DistributedDataParallel(module)
model.register_comm_hook(lc.ddp.State(codec="sym4", error_feedback=True), lc.ddp.hook)
"""

import torch
import torch.distributed as dist

from torch_lowcomm.ddp.state import State

__all__ = ["State", "hook"]


# DDP compares these annotations with the types themselves: no `from __future__ import annotations` here.
def hook(state: State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over the state's group: what `register_comm_hook` takes beside a `State`.

    It returns at once; ops of the next bucket are queued behind this one's.

    Args:
        state: The model's own.
        bucket: DDP's.

    Returns:
        The future of the bucket's buffer, which holds the averages. It fails where the group does.

    Raises:
        TypeError: `state` is no State.
        ValueError: A parameter that the state's model has not, or that a loaded state does not fit.
    """
    if not isinstance(state, State):
        raise TypeError(f"ddp.hook: expected a torch_lowcomm.ddp.State, got {type(state).__name__}")
    return state.reduce(bucket)
