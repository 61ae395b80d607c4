"""What a step would take if only a share of the bytes were sent (QSDP, figure 6): its results are wrong."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from torch_lowcomm import _C
from torch_lowcomm.fsdp.state import QuantizedComms
from torch_lowcomm.groups import exact


def send_share(quantized: QuantizedComms, group: dist.ProcessGroup, ratio: int) -> None:
    """Lets a model that `lc.fsdp.quantize` has quantized send the first 1/ratio of each message: RESULTS ARE WRONG.

    Args:
        quantized: What `lc.fsdp.quantize` returned.
        group: The ranks that shard.
        ratio: Elements of a message / elements that are sent.
    """
    share = ShareComms(group, ratio)
    for comm in (*quantized._gathers, *quantized._reductions):  # no option of the library sends a share
        comm.carrier = share


class ShareComms:
    """The layout ops of a group's backend, which send only the first 1/ratio of the elements, exactly.

    The rest of a gathered shard is taken from this rank's shard, and the rest of a reduced slice from this rank's part. These
    numbers are finite, so that arithmetic takes its usual time. Ranks compute with different weights.

    Args:
        group: The ranks.
        ratio: Elements of a message / elements that are sent.
    """

    def __init__(self, group: dist.ProcessGroup, ratio: int) -> None:
        self._group = group
        self._ratio = ratio

    def reserve_slots(self, count: int) -> int:
        """Returns 0: no slots are needed, because nothing is drawn."""
        return 0

    def all_gather_layout(
        self, output: torch.Tensor, input: torch.Tensor, layout: _C.Layout, *, slot: int, step: int
    ) -> Any:
        """Gathers the first elements of [n] of every rank into [W·n]."""
        part, rows = self._part(input.numel()), output.view(self._group.size(), -1)
        for rank, row in enumerate(rows):
            if rank != self._group.rank():  # its own row may be the input
                row[part:].copy_(input[part:])
        rows[self._group.rank()].copy_(input)
        with exact():
            return dist.all_gather([row[:part] for row in rows], input[:part], group=self._group, async_op=True)

    def reduce_scatter_layout(
        self, output: torch.Tensor, input: torch.Tensor, layout: _C.Layout, op: Any, *, slot: int, step: int
    ) -> Any:
        """Reduces the first elements of each slice of [W·n] to this rank's [n]."""
        part, rows = self._part(output.numel()), input.view(self._group.size(), -1)
        output[part:].copy_(rows[self._group.rank()][part:])
        with exact():
            return dist.reduce_scatter(
                output[:part], [row[:part] for row in rows], op, group=self._group, async_op=True
            )

    def _part(self, elements: int) -> int:
        return -(-elements // self._ratio)
