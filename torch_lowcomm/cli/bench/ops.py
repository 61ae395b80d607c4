"""The ops that are measured: how each is called, how many bytes it sends, and what its result must be."""

import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from torch_lowcomm._torch_names import all_gather_single, reduce_scatter_single

DTYPES = {
    "float": torch.float32,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "double": torch.float64,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
}
REDOPS = {
    "sum": (dist.ReduceOp.SUM, torch.add),
    "prod": (dist.ReduceOp.PRODUCT, torch.mul),
    "min": (dist.ReduceOp.MIN, torch.minimum),
    "max": (dist.ReduceOp.MAX, torch.maximum),
    "avg": (dist.ReduceOp.AVG, torch.add),
}


@dataclasses.dataclass(frozen=True)
class Operation:
    """The properties of one op."""

    name: str
    about: str  # the tensor whose size is given: "of …"
    key: str  # the op's name in a policy
    sent: tuple[str, ...]  # names under which `stats()` counts the bytes that it sends
    bus: Callable[[int], float]  # busbw / algbw at W ranks: the part of `size` that the busiest rank must send
    pieces: Callable[[int], int]  # messages of the busiest rank, each as long as one rank's part
    whole: bool = False  # whether a rank's count is all of `size`, else 1/W of it
    reduces: bool = False
    rooted: bool = False
    equal: bool = False  # whether all ranks end with the same bytes


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks


OPERATIONS = {
    op.name: op
    for op in (
        Operation(
            "all_reduce", "of one rank's tensor", "all_reduce", ("all_reduce",),
            lambda w: 2 * _share(w), lambda w: 2 * (w - 1), whole=True, reduces=True, equal=True,
        ),
        Operation(
            "all_gather", "of the output, all ranks' parts", "all_gather", ("all_gather",),
            _share, lambda w: w - 1, equal=True,
        ),
        Operation(
            "reduce_scatter", "of the input, all ranks' parts", "reduce_scatter", ("reduce_scatter",),
            _share, lambda w: w - 1, reduces=True,
        ),
        Operation(
            "all_to_all", "of the input, all ranks' parts", "all_to_all", ("all_to_all",),
            _share, lambda w: w - 1,
        ),
        Operation(
            "broadcast", "of the tensor", "broadcast", ("broadcast",),
            lambda w: 1.0, lambda w: 1, whole=True, rooted=True, equal=True,
        ),
        Operation(
            "sendrecv", "of what a rank sends to the next rank, as it receives as much from the one before", "p2p",
            ("p2p", "send"), lambda w: 1.0, lambda w: 1, whole=True,
        ),
    )
}  # fmt: skip


@dataclasses.dataclass
class Case:
    """One op at one size on one rank, with its tensors; `count` elements are a rank's part (`Operation.whole`: the tensor)."""

    op: Operation
    rank: int
    ranks: int
    count: int
    dtype: torch.dtype
    redop: str
    root: int

    def __post_init__(self) -> None:
        self._input = self.input_of(self.rank)
        parts = 1 if self.op.whole or self.op.name == "reduce_scatter" else self.ranks
        self.result = self._input.new_empty(self.count * parts)

    def prepare(self) -> None:
        """Fills the result for a call, with values that no op returns, or with the input where torch has only this form."""
        if self.op.name == "all_reduce" or (self.op.rooted and self.rank == self.root):
            self.result.copy_(self._input)
        else:
            self.result.fill_(float("nan") if self.dtype.is_floating_point else 77)

    def call(self, group: dist.ProcessGroup) -> None:
        """Runs the op to its end."""
        name = self.op.name
        if name == "all_reduce":
            dist.all_reduce(self.result, op=REDOPS[self.redop][0], group=group)
        elif name == "all_gather":
            all_gather_single(self.result, self._input, group=group)
        elif name == "reduce_scatter":
            reduce_scatter_single(self.result, self._input, op=REDOPS[self.redop][0], group=group)
        elif name == "all_to_all":
            dist.all_to_all_single(self.result, self._input, group=group)
        elif name == "broadcast":
            dist.broadcast(self.result, self.root, group=group)
        else:
            before, after = (self.rank - 1) % self.ranks, (self.rank + 1) % self.ranks
            ops = [
                dist.P2POp(dist.irecv, self.result, before, group),
                dist.P2POp(dist.isend, self._input, after, group),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

    def expected(self) -> Tensor:
        """Returns the exact result of this rank, in float64 or in the dtype of integers."""
        name, own = self.op.name, slice(self.rank * self.count, (self.rank + 1) * self.count)
        if name == "broadcast":
            return self.input_of(self.root)
        if name == "sendrecv":
            return self.input_of((self.rank - 1) % self.ranks)
        inputs = map(self.input_of, range(self.ranks))
        if name in ("reduce_scatter", "all_to_all"):
            inputs = (x[own].clone() for x in inputs)
        if not self.op.reduces:
            return torch.cat(list(inputs))
        wide = torch.float64 if self.dtype.is_floating_point else self.dtype
        total = functools.reduce(REDOPS[self.redop][1], (x.to(wide) for x in inputs))
        return total / self.ranks if self.redop == "avg" else total

    def input_of(self, rank: int, least: int = 0) -> Tensor:
        """Returns a rank's input, which every rank can make: N(0, 1), or integers from -4 to 4 (unsigned: 0 to 4).

        Of `least` elements or more, whose first ones are the input.
        """
        parts = self.ranks if self.op.name in ("reduce_scatter", "all_to_all") else 1
        elements = max(self.count * parts, least)
        generator = torch.Generator().manual_seed(rank)
        if self.dtype.is_floating_point:
            return torch.randn(elements, generator=generator).to(self.dtype)
        low = 0 if self.dtype == torch.uint8 else -4
        return torch.randint(low, 5, (elements,), generator=generator).to(self.dtype)
