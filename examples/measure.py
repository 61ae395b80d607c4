"""A rank's measurements of its run: bytes sent, and values averaged over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

import torch_lowcomm as lc


def sent_in_messages() -> int:
    """Returns the bytes that this rank has sent in messages, frames and the announcements of receives included."""
    return sum(
        figures["wire_bytes"] or 0
        for ops in lc.stats().values()
        for op, figures in ops.items()
        if op.startswith(("send", "recv"))
    )


def sent_bytes(op: str) -> int:
    """Returns the bytes that this rank has sent in all calls of op, over all lowcomm groups, frames included."""
    return sum(ops[op]["wire_bytes"] for ops in lc.stats().values() if op in ops)


def reduced_bytes() -> int:
    """Returns the bytes that this rank has sent in all_reduces: frames included (NCCL's without headers)."""
    ops = [group["all_reduce"] for group in lc.stats().values() if "all_reduce" in group]
    return sum((op["wire_bytes"] or 0) + op["inner_bytes"] for op in ops)


def mean_over_ranks(value: torch.Tensor) -> float:
    """The mean of a scalar over all ranks, the same bits on each."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def means_over_ranks(values: list[float]) -> list[float]:
    """The mean of each value over all ranks, the same bits on each."""
    totals = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(totals)
    return (totals / dist.get_world_size()).tolist()
