"""The ops that are measured: how each is called, how many bytes it sends, and what its result must be."""

import dataclasses
import functools

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
    rounds: int  # in each of which a rank sends 1/W of size to every other; 0: all of it to one
    whole: bool = False  # whether a rank's count is all of size, else 1/W of it
    reduces: bool = False
    rooted: bool = False
    equal: bool = False  # whether all ranks end with the same bytes

    @property
    def key(self) -> str:
        """The op's name in a policy."""
        return "p2p" if self.name == "sendrecv" else self.name

    def sends(self, elements: int, ranks: int) -> tuple[int, int]:
        """Returns what the busiest rank must send, however the op is done: how many messages, of how many elements each."""
        return (self.rounds * (ranks - 1), -(-elements // ranks)) if self.rounds else (1, elements)


OPERATIONS = {
    op.name: op
    for op in (
        Operation("all_reduce", "of one rank's tensor", 2, whole=True, reduces=True, equal=True),
        Operation("all_gather", "of the output, all ranks' parts", 1, equal=True),
        Operation("reduce_scatter", "of the input, all ranks' parts", 1, reduces=True),
        Operation("all_to_all", "of the input, all ranks' parts", 1),
        Operation("broadcast", "of the tensor", 0, whole=True, rooted=True, equal=True),
        Operation(
            "sendrecv",
            "of what a rank sends to the next rank, as it receives as much from the one before",
            0,
            whole=True,
        ),
    )
}


class Case:
    """One op at one size (bytes, rounded down to whole elements) on one rank, with its tensors."""

    def __init__(
        self, op: Operation, rank: int, ranks: int, size: int, dtype: torch.dtype, redop: str, root: int
    ) -> None:
        self.op, self.rank, self.ranks, self.dtype, self.redop, self.root = op, rank, ranks, dtype, redop, root
        parts = 1 if op.whole else ranks
        self.count = size // dtype.itemsize // parts  # elements of a rank's part
        self.elements = self.count * parts
        if self.count < 1:
            raise ValueError(
                f"expected sizes of at least {parts * dtype.itemsize} bytes, an element of {dtype} for each of {parts} parts, "
                f"got {size}"
            )
        self._input = self.input_of(rank)
        self.result = self._input.new_empty(self.count if op.name == "reduce_scatter" else self.elements)

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

    def input_of(self, rank: int) -> Tensor:
        """Returns a rank's input, which every rank can make: N(0, 1), or integers from -4 to 4 (unsigned: 0 to 4)."""
        elements = self.count if self.op.name == "all_gather" else self.elements
        generator = torch.Generator().manual_seed(rank)
        if self.dtype.is_floating_point:
            return torch.randn(elements, generator=generator).to(self.dtype)
        low = 0 if self.dtype == torch.uint8 else -4
        return torch.randint(low, 5, (elements,), generator=generator).to(self.dtype)
