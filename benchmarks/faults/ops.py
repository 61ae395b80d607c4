"""The ops of the matrix: issued on data that every rank can compute for every other, with what they must give."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import zlib
from typing import Any

import torch
import torch.distributed as dist

from faults.cases import OPS, OTHER, SPEC

POLICY_KEYS = (*OPS[:-1], "p2p")
POLICY = "; ".join(f"{key}={SPEC}" for key in POLICY_KEYS)
CHUNK_BYTES = 65536
# Between two ranks: three frames of the smallest size, in codes and as they are.
PAIR_ELEMENTS = {"compressed": 320 * 1024, "exact": 40 * 1024}
OTHER_SPEC = "sym8:bucket=1024"
# Of the sum of squares, of codes of 4 bits rounded twice (all_reduce) on normal values.
CODE_ERROR = 0.3


def values(n: int, *key: object) -> torch.Tensor:
    """Normal values that depend on the key alone."""
    return _drawn(n, *key).clone()


@functools.lru_cache(maxsize=64)  # a row asks for the same ones four times
def _drawn(n: int, *key: object) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(zlib.crc32(repr(key).encode())))


@dataclasses.dataclass
class PendingOp:
    """An op under way: how to wait for it, what it writes, and the error feedback it was lent."""

    works: list[Any]
    outputs: list[torch.Tensor]
    residual: Any = None
    residual_before: torch.Tensor | None = None

    def wait(self) -> None:
        """Until all of it is done; raises what it fails with."""
        for work in self.works:
            work.wait()

    def completed(self) -> bool:
        """Whether none of it is under way."""
        return all(work.is_completed() for work in self.works)


@dataclasses.dataclass
class Caller:
    """A rank of a group that calls ops."""

    kind: str
    rank: int
    size: int
    elements: int = 0  # between two ranks; 0: PAIR_ELEMENTS

    def __post_init__(self) -> None:
        self.elements = self.elements or PAIR_ELEMENTS[self.kind]

    def input(self, op: str, n: int, key: str, rank: int | None = None) -> torch.Tensor:
        """Returns a rank's contribution; `n` elements between two ranks."""
        whole = op in ("all_reduce", "reduce_scatter", "all_to_all")
        return values(n * self.size if whole else n, op, key, self.rank if rank is None else rank, n)

    def issue(self, op: str, key: str, *, odd: str = "") -> PendingOp:
        """Starts an op; `odd` names how it differs from what the others call."""
        n = self.elements
        if odd == "another shape":
            n //= 2
        spec = SPEC
        scope: Any = contextlib.nullcontext()
        if odd == "another op":
            op = OTHER[op]
        if odd == "another codec" and op == "all_reduce":
            spec = OTHER_SPEC
        elif odd == "another codec":
            import torch_lowcomm as lc

            scope = lc.exact()
        with scope:
            return getattr(self, "_" + op.replace("/", "_"))(n, key, spec)

    def _all_reduce(self, n: int, key: str, spec: str) -> PendingOp:
        x = self.input("all_reduce", n, key)
        if self.kind == "exact":
            return PendingOp([dist.all_reduce(x, async_op=True)], [x])
        import torch_lowcomm as lc

        residual = lc.Residual(x)
        residual.load_state_dict({"value": values(x.numel(), "residual", key, self.rank) / 8})
        before = residual.value.clone()
        work = lc.all_reduce(x, codec=spec, residual=residual, async_op=True)
        return PendingOp([work], [x], residual, before)

    def _all_gather(self, n: int, key: str, _: str) -> PendingOp:
        out = torch.zeros(n * self.size)
        return PendingOp([dist.all_gather_into_tensor(out, self.input("all_gather", n, key), async_op=True)], [out])

    def _reduce_scatter(self, n: int, key: str, _: str) -> PendingOp:
        out = torch.zeros(n)
        return PendingOp([dist.reduce_scatter_tensor(out, self.input("reduce_scatter", n, key), async_op=True)], [out])

    def _all_to_all(self, n: int, key: str, _: str) -> PendingOp:
        out = torch.zeros(n * self.size)
        return PendingOp([dist.all_to_all_single(out, self.input("all_to_all", n, key), async_op=True)], [out])

    def _broadcast(self, n: int, key: str, _: str) -> PendingOp:
        root = self.size - 1
        x = self.input("broadcast", n, key) if self.rank == root else torch.zeros(n)
        return PendingOp([dist.broadcast(x, root, async_op=True)], [x])

    def _gather(self, n: int, key: str, _: str) -> PendingOp:
        outs = [torch.zeros(n) for _ in range(self.size)] if self.rank == 0 else None
        return PendingOp([dist.gather(self.input("gather", n, key), outs, dst=0, async_op=True)], outs or [])

    def _send_recv(self, n: int, key: str, _: str) -> PendingOp:
        """Around the ring: to the next rank, from the one before."""
        out = torch.zeros(n)
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        ops = [
            dist.P2POp(dist.irecv, out, left),
            dist.P2POp(dist.isend, self.input("send/recv", n, key), right),
        ]
        return PendingOp(dist.batch_isend_irecv(ops), [out])

    def expected(self, op: str, key: str) -> list[torch.Tensor]:
        """Returns the result of exact arithmetic."""
        n = self.elements
        inputs = [self.input(op, n, key, rank) for rank in range(self.size)]
        mine = slice(n * self.rank, n * (self.rank + 1))
        if op in ("all_reduce", "reduce_scatter"):
            if self.kind == "compressed" and op == "all_reduce":
                inputs = [x + values(x.numel(), "residual", key, rank) / 8 for rank, x in enumerate(inputs)]
            total = torch.stack(inputs).sum(0)
            return [total if op == "all_reduce" else total[mine]]
        if op == "all_gather":
            return [torch.cat(inputs)]
        if op == "all_to_all":
            return [torch.cat([x[mine] for x in inputs])]
        if op == "broadcast":
            return [inputs[-1]]
        if op == "gather":
            return inputs if self.rank == 0 else []
        return [inputs[self.rank - 1]]

    def right(self, op: str, key: str, outputs: list[torch.Tensor]) -> bool:
        """Whether outputs are what exact arithmetic gives, as near as 4 bits (or the order of a sum) come to it."""
        bound = CODE_ERROR if self.kind == "compressed" else 1e-6
        return all(
            float((got - want).norm()) <= bound * float(want.norm())
            for got, want in zip(outputs, self.expected(op, key), strict=True)
        )


def same_bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Equal to the last bit."""
    return len(a) == len(b) and all(
        torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(a, b, strict=True)
    )


def options(compressed: bool) -> Any:
    """Returns the options of a row's groups."""
    import torch_lowcomm as lc

    return lc.Options(policy=POLICY if compressed else "", min_bytes=0, chunk_bytes=CHUNK_BYTES)
