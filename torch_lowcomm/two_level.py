"""An all_reduce over hosts and the ranks of a host: exact inside a host, by codes between hosts."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future

from torch_lowcomm._copies import NotCopied
from torch_lowcomm._host_levels import HostLevels
from torch_lowcomm._hosts import rows_of, table_of_mesh
from torch_lowcomm._op_queue import OpQueue
from torch_lowcomm.codec import CODED
from torch_lowcomm.codec import codec as checked_codec
from torch_lowcomm.groups import backend_of
from torch_lowcomm.reduction import Residual, all_reduce, as_op


class TwoLevel(NotCopied):
    """An all_reduce over hosts × ranks of a host, compressed only between hosts.

        two = lc.TwoLevel(codec="sym4:bucket=1024")
        two.all_reduce(gradient, dist.ReduceOp.AVG)

    Each of a host's L ranks sends a slice of ceil(n / L) of a tensor's n elements over the slow link (the last ranks fewer, or
    none). So a host's link carries one coded tensor an op, and not one for each rank. The two levels have separate groups of
    backend lowcomm, `inside` and `between`, which are made here and ended by `destroy_process_group()`. Ops of the program's
    other groups neither wait for these groups nor come between their ops, and no policy of the environment applies to
    them. `lc.stats(two.between)` has what this rank put on the slow link.

    One worker thread runs the ops in the order of issue, with `async_op` and without. An op consists of two to four ops of
    groups, which all ranks must issue in one order; callbacks of futures would run in any order.

    An op that fails between hosts on one rank fails on all of them. If the reason was a value (a NaN), the next op works. A
    fault or a difference (of sizes, ops) inside a host raises an error of its reduce_scatter on the host's ranks. The other
    hosts learn of it at once, from an all_gather that differs from their op. The groups cannot be used any more: make
    another TwoLevel.

    NCCL reduces CUDA tensors inside a host, on another stream than the caller's; no GPU has run this.

    Args:
        hosts: A mesh [hosts, ranks of a host], or such a slice of a larger one; every rank in it makes the TwoLevel. None for
            the ranks of the default group, by the network namespaces of their machines. Collective.
        codec: Codec text for tensors between hosts. Not by channel, because these tensors are flat.
        timeout: Progress deadline of both groups. It also bounds how much later one slice of a tensor may cross the link than
            another. None for torch's default of a new group, half an hour.

    Raises:
        ValueError: A mesh or a codec is wrong, or hosts have different numbers of ranks.
        DistBackendError: Ranks have different codecs or meshes, or a rank did not come.
    """

    _instead = "make a new one"

    def __init__(
        self,
        hosts: DeviceMesh | None = None,
        *,
        codec: str = "sym4:bucket=1024",
        timeout: timedelta | None = None,
    ) -> None:
        rows = rows_of(backend_of()) if hosts is None else table_of_mesh("TwoLevel", hosts).tolist()
        if len({len(row) for row in rows}) > 1:
            raise ValueError(f"TwoLevel: expected as many ranks on every host, got {list(map(len, rows))}: pass a mesh")
        self._codec = _rounding(codec)
        self._levels = HostLevels(torch.tensor(rows), self._codec, timeout)
        self.inside, self.between = self._levels.inside, self._levels.between
        self._queue = OpQueue("lowcomm-two-level")

    def slice_elements(self, numel: int) -> int:
        """Returns how many of a tensor's `numel` elements this rank sends over the slow link in an all_reduce."""
        length = -(-numel // self._levels.ranks)
        return max(0, min(numel - self._levels.place * length, length))

    def residual(self, like: torch.Tensor) -> Residual:
        """Makes the error feedback for all_reduces of tensors of this size: zeros [elements of this rank's slice]."""
        return Residual(torch.empty(self.slice_elements(like.numel())))

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        *,
        residual: Residual | None = None,
        async_op: bool = False,
    ) -> Future[torch.Tensor] | None:
        """Reduces a tensor in place, exactly inside a host and by codes between hosts. Collective.

        1. A reduce_scatter inside the host gives each rank the host's sum of a slice, exactly.
        2. The ranks of a slice all_reduce it between hosts by codes.
        3. An all_gather inside the host puts the slices together, exactly.

        All ranks of all hosts end with the same bits. A host sends about 2 (hosts - 1) / hosts of the tensor's elements, in
        codes. With one host nothing is coded.

        Args:
            tensor: float32, float16 or bfloat16, with the same number of elements on all ranks; do not touch it until the op
                has ended.
            op: SUM or AVG.
            residual: Made by `residual(tensor)` for this tensor alone. Over hosts and steps the sum of the hosts' sums is the
                sum of the residuals and of the applied tensors; with AVG that of the hosts' means is the sum of the
                residuals and of `hosts` times the applied tensors. It changes on all ranks when the op has succeeded
                between the hosts, else on none.
            async_op: Whether to return a future at once. Its callbacks run on the worker and must not wait for another op.

        Returns:
            With async_op the future of the tensor, whose wait() raises the op's error; else None.

        Raises:
            ValueError: The op is not supported, or the residual has another size or is in use; on the ranks that sent it, a
                value that the codec refuses (a NaN).
            TypeError: The dtype is not supported.
            DistBackendError: Another rank could not send its part, ranks disagree, or a peer or the network failed.
        """
        op = as_op(op)
        if tensor.dtype not in CODED:
            raise TypeError(f"TwoLevel: all_reduce: expected float32, float16 or bfloat16, got {tensor.dtype}")
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"TwoLevel: all_reduce: expected SUM or AVG, got {op}")
        expected = self.slice_elements(tensor.numel())
        if residual is not None and residual.value.numel() != expected:
            raise ValueError(
                f"TwoLevel: all_reduce: expected a residual of this rank's slice, {expected} elements of "
                f"{tensor.numel()}, got one of {residual.value.numel()}"
            )
        return self._queue.issue(lambda: self._all_reduce(tensor.detach(), op, residual), [tensor], async_op)

    def _all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp, residual: Residual | None) -> None:
        levels, flat = self._levels, tensor.reshape(-1)  # a view where the tensor is contiguous
        slices = self._slices(flat)
        mine = slices[levels.place]
        if levels.ranks > 1:
            mine = torch.empty_like(mine)
            levels.reduce_inside(mine, slices, op)

        def between() -> None:
            if levels.hosts > 1 and mine.numel():  # the slice has the same length on every host
                all_reduce(mine, op, self.between, codec=self._codec, residual=residual)

        before = residual.value if residual is not None else None
        try:
            levels.run_between("all_reduce", between)
        except Exception:
            if residual is not None and residual.value is not before:
                residual._state.set(before)  # this slice has arrived, another has not
            raise
        if levels.ranks > 1:
            dist.all_gather(slices, mine, group=self.inside)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view_as(tensor))

    def _slices(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns a view for each rank of the host; the last views may be shorter, or empty."""
        ranks = self._levels.ranks
        length = -(-flat.numel() // ranks)
        return [flat[place * length : (place + 1) * length] for place in range(ranks)]


def _rounding(codec: str) -> str:
    """Returns a codec's canonical text; ValueError if a TwoLevel cannot use the codec."""
    spec = checked_codec(codec).spec
    if spec == "none" or "axis=channel" in spec:
        raise ValueError(f"TwoLevel: expected a codec that rounds, in buckets of a flat tensor, got {spec!r}")
    return spec
