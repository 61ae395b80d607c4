"""Gathers and reductions over hosts × ranks of a host: exact inside a host, by a layout's codecs between hosts."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future

from torch_lowcomm import _C
from torch_lowcomm._copies import NotCopied
from torch_lowcomm._host_levels import HostLevels
from torch_lowcomm._hosts import hosts_of
from torch_lowcomm._log import logger
from torch_lowcomm._op_queue import OpQueue
from torch_lowcomm.fsdp._torch_2_11 import ParameterGroup
from torch_lowcomm.groups import backend_of
from torch_lowcomm.reduction import as_op


def checked_hosts(hosts: DeviceMesh | str, groups: Sequence[ParameterGroup]) -> torch.Tensor | None:
    """Returns the table of the hosts of all groups, as `hosts_of`. A mesh whose rows do not follow each other in the order of
    shards is a ValueError; hosts that were found so are warned of, and None.
    """
    tables = [hosts_of("fsdp.quantize", backend_of(g.group), hosts, least=1) for g in groups]
    first = tables[0]
    for g, table in zip(groups, tables, strict=True):
        shards = dist.get_process_group_ranks(g.group)
        if table is None or (table.flatten().tolist() == shards and first is not None and torch.equal(table, first)):
            continue
        text = (
            f"fsdp.quantize: hosts: expected ranks that shard {type(g.module).__name__} host by host, as those of every wrapped "
            f"module, got {shards} on hosts of {table.tolist()}"
        )
        if isinstance(hosts, DeviceMesh):
            raise ValueError(text)
        logger.warning("%s: every rank sends a copy of its own", text)
        return None
    return first


class HostComms(NotCopied):
    """The layout ops of a group's backend, on two levels: the slow link carries one coded copy for each host.

    The owner of a shard encodes it once, for the ranks at its place on the other hosts. Hosts pass the decoded values on, so
    that all ranks, the owner too, have the same bits. Gradients are first summed exactly on their host. One worker runs
    the ops in the order of issue. Collective. The table is [hosts, ranks of a host], the time-out that of both levels' groups.
    """

    _instead = "make a new one"

    def __init__(self, table: torch.Tensor, timeout: timedelta | None) -> None:
        self._levels = HostLevels(table, timeout)
        self.inside, self.between = self._levels.inside, self._levels.between
        self._queue = OpQueue("lowcomm-two-level")

    def reserve_slots(self, count: int) -> int:
        """Reserves slots for random draws in the group between hosts; a reduction takes one for each segment of a slice."""
        return backend_of(self.between).reserve_slots(count)

    def all_gather_layout(
        self, output: torch.Tensor, input: torch.Tensor, layout: _C.Layout, *, slot: int, step: int
    ) -> dist.Work:
        """Gathers [n] of every rank into [hosts · ranks · n], host by host; the Work raises its error."""
        levels, between = self._levels, backend_of(self.between)

        def run() -> None:
            column = input.new_empty(levels.hosts, input.numel())  # of the ranks at this place of every host
            levels.run_between(
                "all_gather",
                lambda: between.all_gather_layout(column.view(-1), input.view(-1), layout, slot=slot, step=step).wait(),
                alone=lambda: column.copy_(input.reshape(1, -1)),
            )
            by_place = output.view(levels.hosts, levels.ranks, input.numel()).unbind(1)
            if levels.ranks > 1:
                dist.all_gather(list(by_place), column, group=self.inside)
            else:
                by_place[0].copy_(column)

        return self._issue(run, [output, input])

    def reduce_scatter_layout(
        self, output: torch.Tensor, input: torch.Tensor, layout: _C.Layout, op: Any, *, slot: int, step: int
    ) -> dist.Work:
        """Reduces [hosts · ranks · n], host by host, to this rank's [n]; op is SUM, AVG or PREMUL_SUM."""
        levels, between, op = self._levels, backend_of(self.between), as_op(op)
        # A factor is applied once, to the contributions to the host's sum.
        op_between = op if op == dist.ReduceOp.AVG else dist.ReduceOp(dist.ReduceOp.SUM)

        def run() -> None:
            by_place = input.view(levels.hosts, levels.ranks, output.numel()).unbind(1)
            column = input.new_empty(levels.hosts, output.numel())  # this host's sums for this place of every host
            if levels.ranks > 1:
                levels.reduce_inside(column, list(by_place), op)
            else:
                column.copy_(by_place[0])
            levels.run_between(
                "reduce_scatter",
                lambda: between.reduce_scatter_layout(
                    output, column.view(-1), layout, op_between, slot=slot, step=step
                ).wait(),
                alone=lambda: output.copy_(column.view_as(output)),
            )

        return self._issue(run, [output, input])

    def _issue(self, run: Any, tensors: list[torch.Tensor]) -> dist.Work:
        return _FutureWork(self._queue.issue(run, tensors))


class _FutureWork(dist.Work):
    """A Work, which FSDP2 needs, made from a future."""

    def __init__(self, future: Future[torch.Tensor]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._future.wait()
        return True

    def get_future(self) -> Future[torch.Tensor]:
        return self._future
