"""The collectives of the standard set: their tensors, what they must give, what they must send."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import torch_lowcomm as lc

CODEC = "sym4:bucket=1024"
# An op's key in a policy.
KEYS = {"all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "exchange": "p2p"}


@dataclasses.dataclass
class Case:
    """An op of one rank with its tensors allocated. `prepare` is called before each `call`, and not timed.

    `exact` is its result in fp32, `decoded` what the codec makes of it where that is known beforehand: no sum was coded.
    A rank sends `messages` messages of `elements` elements to whom they are for, whatever the way they take.
    """

    call: Callable[[dist.ProcessGroup], object]
    output: Tensor
    exact: Tensor
    decoded: Tensor | None
    messages: int
    elements: int
    peers: list[int]
    same_everywhere: bool  # whether all ranks end with the same tensor
    sums: bool  # whether the exact result depends on the order of a sum
    prepare: Callable[[], object] = lambda: None

    def needed_bytes(self, codec: str | None) -> int:
        """Returns the bytes that a rank must send, exact or coded, without frames."""
        return self.messages * (lc.codec(codec).encoded_bytes(self.elements) if codec else 4 * self.elements)


def normal(rank: int, elements: int) -> Tensor:
    """Rank's fp32 N(0, 1) tensor, known to every rank."""
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank))


def make(op: str, rank: int, size: int, elements: int) -> Case:
    """`elements` is of the whole tensor: input of all_reduce and reduce_scatter, output of all_gather, message of exchange."""
    return _MAKERS[op](rank, size, elements)


def _others(rank: int, size: int) -> list[int]:
    return [other for other in range(size) if other != rank]


def _sum(size: int, elements: int) -> Tensor:
    total = normal(0, elements)
    for rank in range(1, size):
        total += normal(rank, elements)
    return total


def _all_reduce(rank: int, size: int, elements: int) -> Case:
    mine = normal(rank, elements)
    output = torch.empty_like(mine)

    return Case(
        prepare=lambda: output.copy_(mine),  # in place, as it is used
        call=lambda group: dist.all_reduce(output, group=group),
        output=output,
        exact=_sum(size, elements),
        decoded=None,
        messages=2 * (size - 1),
        elements=elements // size,
        peers=_others(rank, size),
        same_everywhere=True,
        sums=True,
    )


def _all_gather(rank: int, size: int, elements: int) -> Case:
    shards = [normal(r, elements // size) for r in range(size)]
    exact = torch.cat(shards)
    output = torch.empty_like(exact)
    codec = lc.codec(CODEC)
    return Case(
        call=lambda group: dist.all_gather_into_tensor(output, shards[rank], group=group),
        output=output,
        exact=exact,
        decoded=torch.cat([codec.roundtrip(shard) for shard in shards]),
        messages=size - 1,
        elements=elements // size,
        peers=_others(rank, size),
        same_everywhere=True,
        sums=False,
    )


def _reduce_scatter(rank: int, size: int, elements: int) -> Case:
    mine = normal(rank, elements)
    exact = _sum(size, elements).chunk(size)[rank].clone()
    output = torch.empty_like(exact)
    return Case(
        call=lambda group: dist.reduce_scatter_tensor(output, mine, group=group),
        output=output,
        exact=exact,
        decoded=None,
        messages=size - 1,
        elements=elements // size,
        peers=_others(rank, size),
        same_everywhere=False,
        sums=True,
    )


def _exchange(rank: int, size: int, elements: int) -> Case:
    """Everybody sends to the next and receives from the one before: with two ranks, both ways between them."""
    after, before = (rank + 1) % size, (rank - 1) % size
    mine, exact = normal(rank, elements), normal(before, elements)
    output = torch.empty_like(exact)

    def call(group: dist.ProcessGroup) -> None:
        ops = [dist.P2POp(dist.irecv, output, before, group), dist.P2POp(dist.isend, mine, after, group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return Case(
        call=call,
        output=output,
        exact=exact,
        decoded=lc.codec(CODEC).roundtrip(exact),
        messages=1,
        elements=elements,
        peers=sorted({after, before}),
        same_everywhere=False,
        sums=False,
    )


_MAKERS = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "exchange": _exchange,
}
