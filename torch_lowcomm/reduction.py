"""all_reduce by a codec that the caller names, with error feedback that changes only when the op succeeds."""

from typing import Any

import torch
import torch.distributed as dist

from torch_lowcomm import _C
from torch_lowcomm.groups import backend_of


class Residual:
    """The error feedback of one tensor: what its encodings have lost so far. The caller keeps and saves it.

    `all_reduce` adds the residual to the tensor that it sends and keeps the loss in it, including this rank's share of the
    second encoding. Over all ranks and steps the sum of the tensors is the sum of the residuals and of the applied tensors
    (Seide et al., 1-Bit Stochastic Gradient Descent; Interspeech 2014). A residual changes when an op succeeds; a failed op
    leaves it as it was.

    Args:
        like: A tensor whose shape the residual takes. The residual starts as zeros, float32, in host memory.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self._state = _C.Residual(list(like.shape))

    @property
    def value(self) -> torch.Tensor:
        """The residual, float32 in host memory. While an op is under way it is as before the op. Do not write to it."""
        return self._state.value

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns {"value": a copy of the residual} for a checkpoint."""
        return {"value": self.value.clone()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Loads what `state_dict` returned.

        Raises:
            ValueError: The value has another shape, or an op is under way.
        """
        self._state.set(state["value"])

    def __getstate__(self) -> dict[str, torch.Tensor]:
        return self.state_dict()

    def __setstate__(self, state: dict[str, torch.Tensor]) -> None:
        self._state = _C.Residual(list(state["value"].shape))
        self.load_state_dict(state)


def all_reduce(
    tensor: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    *,
    codec: str,
    residual: Residual | None = None,
    async_op: bool = False,
) -> Any:
    """Reduces a tensor in place by codes. The group's policy, its min_bytes and `exact()` do not apply. Collective.

    Each rank owns a slice of the tensor. The owner decodes the contributions to its slice and sums them in rank order. It
    encodes the sum, which all ranks decode, the owner too. So every rank ends with the same bits.

    Args:
        tensor: float32, float16 or bfloat16, of one shape on all ranks.
        op: SUM or AVG; without a residual also PREMUL_SUM.
        group: A group of backend lowcomm; None for the default group.
        codec: Codec text, e.g. "sym4:bucket=1024"; the same on all ranks.
        residual: The error feedback of this tensor; the op has it until it ends.
        async_op: Whether to return the Work at once.

    Returns:
        The Work with async_op, else None.

    Raises:
        ValueError: The op or codec is not supported, the residual has another size or is in use, or the codec refuses an
            element (a NaN).
        TypeError: The dtype is not supported.
        DistBackendError: A peer could not send its part, ranks disagree, or a peer or the network failed.
    """
    state = residual._state if residual is not None else None
    work = backend_of(group).all_reduce_coded(tensor, as_op(op), codec, state)
    if async_op:
        return work
    work.wait()
    return None


def as_op(op: Any) -> dist.ReduceOp:
    """Returns an op as the C++ functions take it; torch's names of ops are of another type."""
    return op if isinstance(op, dist.ReduceOp) else dist.ReduceOp(op)
