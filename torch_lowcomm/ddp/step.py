"""The ops of one backward pass. They change the state of compressions only if all of them succeed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future, collect_all

from torch_lowcomm import _C
from torch_lowcomm._host_levels import HostLevels
from torch_lowcomm._hosts import FLAT
from torch_lowcomm._op_queue import OpQueue
from torch_lowcomm.ddp.parameters import Entry, StateOptions
from torch_lowcomm.groups import exact


@dataclass(frozen=True)
class Way:
    """Where a state's ops run: on the model's group, or on both levels of its hosts, where a worker runs them in turn."""

    group: dist.ProcessGroup  # of the model
    levels: HostLevels | None
    queue: OpQueue | None  # with levels

    @staticmethod
    def over(group: dist.ProcessGroup, table: torch.Tensor | None, timeout: timedelta) -> Way:
        """Makes the two levels of a table of hosts, if there is one. Collective then."""
        if table is None:
            return Way(group, None, None)
        return Way(group, HostLevels(table, timeout), OpQueue("lowcomm-ddp"))

    @property
    def rows(self) -> str | list[list[int]]:
        """The global ranks of each host, or "flat"."""
        return FLAT if self.levels is None else self.levels.rows

    @property
    def coding(self) -> dist.ProcessGroup:
        """The group of the coded ops."""
        return self.group if self.levels is None else self.levels.between


class Step:
    """The ops of one step, and the compressions to commit when the last op has ended.

    The random draws of its ops depend on its number, from 0. `backend` is that of the coded ops.
    """

    def __init__(self, number: int, way: Way, backend: _C.LowcommBackend, options: StateOptions) -> None:
        self.number = number
        self._way, self._backend, self._options = way, backend, options
        self._futures: list[Future[torch.Tensor]] = []
        self._lent: list[_C.Compression] = []
        self._exact: list[torch.Tensor] = []

    def reduce(self, bucket: dist.GradBucket, entries: Sequence[Entry] | None) -> Future[torch.Tensor]:
        """Starts to average a bucket, whose gradients are sent as `entries` say; None sends all of them exactly.

        The future is of the bucket's buffer. That of the last bucket ends when all ops of the step have ended and the
        compressions are committed or rolled back.
        """
        buffer = bucket.buffer()
        views = [] if entries is None else [_flat(buffer, gradient) for gradient in bucket.gradients()]
        pairs = list(zip(entries or (), views, strict=True))
        coded = [(entry, view) for entry, view in pairs if entry.rank is not None]
        apart = [view for entry, view in pairs if entry.rank is None]
        if self._way.queue is not None and not buffer.is_sparse:
            run = functools.partial(self._over_hosts, buffer, coded, apart if coded else [buffer])
            ended = self._way.queue.issue(run, [buffer])
            self._exact.append(buffer)  # the host's other ranks know no more of this rank's codes than their result
        elif not coded:
            ended = self._average(buffer, self._way.group)
            self._exact.append(buffer)
        else:
            ended = self._mixed(buffer, coded, apart)
        self._futures.append(ended)
        if not bucket.is_last():
            return ended
        return after(self._futures, self._settle, buffer)

    def roll_back(self) -> None:
        """Restores the compressions of a step that did not come to its end."""
        if self._way.queue is not None and self._futures:
            self._way.queue.issue(lambda: None, [torch.empty(0)]).wait()  # behind what lends compressions
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
            futures.append(self._average(together, self._way.coding))
            self._exact.append(together)
        work = self._backend.all_reduce_low_rank(
            [view for _, view in coded],
            dist.ReduceOp(dist.ReduceOp.AVG),
            self._options.codec,
            self._options.projection_codec,
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

    def _over_hosts(
        self, buffer: torch.Tensor, coded: list[tuple[Entry, torch.Tensor]], apart: list[torch.Tensor]
    ) -> None:
        """Averages a bucket exactly inside each host, and each place's part of it between hosts."""
        levels = self._way.levels
        assert levels is not None
        levels.average_inside(buffer)
        together = torch.cat(apart) if apart else buffer.new_empty(0)
        cuts = levels.cut(together.numel(), 0)
        pieces = [
            [together[slice(*cuts[place])], *(view[slice(*entry.parts[place])] for entry, view in coded)]
            for place in range(levels.ranks)
        ]
        exactly, *codes = pieces[levels.place]

        def between() -> None:
            mine = [(entry, code) for (entry, _), code in zip(coded, codes, strict=True) if code.numel()]
            if mine:
                self._mixed(buffer, mine, [exactly] if exactly.numel() else []).wait()
            elif exactly.numel():
                self._average(exactly, levels.between).wait()

        levels.run_between("ddp", between)
        levels.share(pieces)
        for view, part in zip(apart, together.split([view.numel() for view in apart]), strict=True):
            view.copy_(part)

    def _average(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> Future[torch.Tensor]:
        """Averages exactly, as DDP without a hook does (bit for bit at two ranks); the group's policy does not apply."""
        tensor.mul_(1.0 / group.size())  # not div_, whose bits differ
        with exact():
            work = dist.all_reduce(tensor, group=group, async_op=True)
        return after([work.get_future()], lambda: None, tensor)

    def _settle(self) -> None:
        if self._lent:
            # Results are equal on all ranks, and so is this decision.
            finite = all(c.done for c in self._lent) and all(map(_is_finite, self._exact))
            for compression in self._lent:
                compression.commit() if finite else compression.roll_back()
            self._lent.clear()
        self._exact.clear()
        self._futures = []


def after(futures: Sequence[Future[Any]], run: Callable[[], None], result: torch.Tensor) -> Future[torch.Tensor]:
    """Returns the future of a tensor that is ready once `run` has run, after all of several futures have ended.

    torch's own future of several (`collect_all`) has no device: it does not wait for their streams, and a wait for it does
    not cover kernels that were enqueued after them. Here the kernels of `run` wait for the streams of each, and on a CUDA
    device a wait for the result makes the current stream wait for them. The result raises what `run` or a future raises; `run`
    is called by the thread that ends the last future.
    """
    ended: list[Future[Any]] = []
    begin: Future[None] = Future(devices=[result.device] if result.device.type == "cuda" else None)

    def all_ended(of_all: Future[Any]) -> None:
        ended.append(of_all)
        begin.set_result(None)

    def finish(_: Future[None]) -> torch.Tensor:
        ended[0].value()  # raises what one has failed with
        for future in futures:
            future.wait()  # makes the current stream wait too
        run()
        return result

    finished = begin.then(finish)  # an error in a callback of then() reaches C++; an error set on a Future does not
    collect_all(list(futures)).add_done_callback(all_ended)
    return finished


def _is_finite(tensor: torch.Tensor) -> bool:
    numbers = tensor.coalesce().values() if tensor.is_sparse else tensor
    return bool(numbers.isfinite().all())


def _flat(buffer: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Returns a gradient's part of its bucket in the order of memory, because the gradient may be a channels-last view."""
    return buffer.narrow(0, gradient.storage_offset() - buffer.storage_offset(), gradient.numel())
