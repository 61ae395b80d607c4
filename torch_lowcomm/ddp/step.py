"""One backward pass: its buckets' ops, which leave the compressions' state as it was unless all of them succeed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.futures import Future

from torch_lowcomm import _C
from torch_lowcomm.ddp.futures import after
from torch_lowcomm.ddp.parameters import Entry
from torch_lowcomm.groups import exact


class Step:
    """Ops of one step, and what is to be settled when the last one has ended.

    Args:
        number: Counted from 0; what the draws of the step's ops depend on.
        group: Of backend lowcomm.
        backend: Its backend.
        codec: Of what is coded, with nonfinite=poison.
        projection_codec: Of the first factors, likewise.
    """

    def __init__(
        self, number: int, group: dist.ProcessGroup, backend: _C.LowcommBackend, codec: str, projection_codec: str
    ) -> None:
        self.number = number
        self._group, self._backend = group, backend
        self._codec, self._projection_codec = codec, projection_codec
        self._futures: list[Future[torch.Tensor]] = []
        self._lent: list[_C.Compression] = []
        self._exact: list[torch.Tensor] = []

    def reduce(self, bucket: dist.GradBucket, entries: Sequence[Entry] | None) -> Future[torch.Tensor]:
        """Start averaging a bucket: each gradient as its entry says, all of it exact without entries.

        The last bucket's future ends when the step is settled, whatever the order in which ops end.
        """
        buffer = bucket.buffer()
        views = [] if entries is None else [_flat(buffer, gradient) for gradient in bucket.gradients()]
        pairs = list(zip(entries or (), views, strict=True))
        coded = [(entry, view) for entry, view in pairs if entry.compression is not None]
        apart = [view for entry, view in pairs if entry.compression is None]
        if not coded:
            ended = self._average(buffer)
            self._exact.append(buffer)
        else:
            ended = self._mixed(buffer, coded, apart)
        self._futures.append(ended)
        if not bucket.is_last():
            return ended
        return after(self._futures, self._settle, buffer)

    def roll_back(self) -> None:
        """Of a step that never came to its end: leave its compressions as they were before it."""
        for compression in self._lent:
            compression.roll_back()
        self._lent.clear()

    def _mixed(
        self, buffer: torch.Tensor, coded: list[tuple[Entry, torch.Tensor]], apart: list[torch.Tensor]
    ) -> Future[torch.Tensor]:
        compressions = [entry.compression for entry, _ in coded if entry.compression is not None]
        futures, together = [], None
        if apart:
            together = torch.cat(apart)
            futures.append(self._average(together))
            self._exact.append(together)
        work = self._backend.all_reduce_compressed(
            [view for _, view in coded],
            dist.ReduceOp(dist.ReduceOp.AVG),
            self._codec,
            self._projection_codec,
            compressions,
            slots=[entry.slot for entry, _ in coded],
            owners=[entry.number for entry, _ in coded],
            step=self.number % 2**32,
        )
        self._lent += compressions
        futures.append(work.get_future())

        def finish() -> None:
            if together is not None:
                for view, part in zip(apart, together.split([view.numel() for view in apart]), strict=True):
                    view.copy_(part)

        return after(futures, finish, buffer)

    def _average(self, tensor: torch.Tensor) -> Future[torch.Tensor]:
        """As DDP without a hook does it, to the bit at two ranks; no policy of the group applies."""
        tensor.mul_(1.0 / self._backend.size())  # not div_, of which the bits are others
        with exact():
            work = dist.all_reduce(tensor, group=self._group, async_op=True)
        return after([work.get_future()], lambda: None, tensor)

    def _settle(self) -> None:
        if self._lent:
            # Results are the same on all ranks, so what this says is.
            finite = all(c.done for c in self._lent) and all(bool(t.isfinite().all()) for t in self._exact)
            for compression in self._lent:
                compression.commit() if finite else compression.roll_back()
            self._lent.clear()
        self._exact.clear()
        self._futures = []


def _flat(buffer: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient's part of its bucket, in the order of memory: it may be a channels-last view."""
    return buffer.narrow(0, gradient.storage_offset() - buffer.storage_offset(), gradient.numel())
