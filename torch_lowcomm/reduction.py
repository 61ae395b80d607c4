"""all_reduce by a codec that the caller names, with error feedback as a transaction of the caller's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from torch_lowcomm import _C
from torch_lowcomm.groups import backend_of


class Residual:
    """What the encodings of one tensor have lost so far: error feedback's state, the caller's to keep and to save.

    `all_reduce` adds it to what it sends and keeps in it what that loses, the second encoding's share included: over all
    ranks and steps the sum of the tensors is the sum of the residuals and of what was applied (Seide et al., 1-Bit
    Stochastic Gradient Descent; Interspeech 2014). It changes when an op succeeds; a failed op leaves it as it was.

    Args:
        like: The tensor it is for; its shape is taken. The residual starts as zeros, float32, in host memory.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self._state = _C.Residual(list(like.shape))

    @property
    def value(self) -> torch.Tensor:
        """The residual, float32 on the host; while an op is under way, what it was before. Not to be written to."""
        return self._state.value

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy of the value, for a checkpoint."""
        return {"value": self.value.clone()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over what `state_dict` gave.

        Raises:
            ValueError: Another shape, or an op is under way.
        """
        self._state.set(state["value"])


def all_reduce(
    tensor: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    *,
    codec: str,
    residual: Residual | None = None,
    async_op: bool = False,
) -> Any:
    """Reduce a tensor in place by codes, whatever the group's policy, its min_bytes and `exact()` say.

    Every rank ends with the same bits: each slice's contributions are decoded and summed in rank order by its owner, whose
    encoded result all ranks decode, itself included. Collective.

    Args:
        tensor: float32, float16 or bfloat16, of one shape on all ranks.
        op: SUM or AVG; without a residual PREMUL_SUM too.
        group: A group of backend lowcomm; None for the default one.
        codec: Codec text, e.g. "sym4:bucket=1024"; the same on all ranks.
        residual: This tensor's error feedback; lent to the op until it ends.
        async_op: Return the Work at once.

    Returns:
        The Work with async_op, else None.

    Raises:
        ValueError: Another op or codec, a residual of another size or in use, or elements that the codec refuses (a NaN).
        TypeError: Another dtype.
        DistBackendError: A peer could not send its part, ranks disagree, or a peer or the network failed.
    """
    state = residual._state if residual is not None else None
    work = backend_of(group).all_reduce_coded(tensor, _as_op(op), codec, state)
    if async_op:
        return work
    work.wait()
    return None


def _as_op(op: Any) -> dist.ReduceOp:
    return op if isinstance(op, dist.ReduceOp) else dist.ReduceOp(op)
