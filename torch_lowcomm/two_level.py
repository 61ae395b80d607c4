"""Collectives over hosts and the ranks of a host: exact inside a host, by codes between hosts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future

from torch_lowcomm import _C
from torch_lowcomm._hosts import hosts_of_environment, hosts_of_mesh
from torch_lowcomm._op_queue import OpQueue
from torch_lowcomm.codec import codec as checked_codec
from torch_lowcomm.reduction import Residual, all_reduce

_CODED = (torch.float32, torch.float16, torch.bfloat16)
_NOTE_BYTES = 512  # of what ranks of a host tell one another about the link's part of an op


class TwoLevel:
    """all_reduce, all_gather and reduce_scatter over hosts × ranks of a host, compressed only between hosts.

        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("hosts", "ranks"))
        two = lc.TwoLevel(mesh, codec="sym4:bucket=1024", inside="ranks", between="hosts")
        two.all_reduce(gradient, dist.ReduceOp.AVG)

    Of n elements each of a host's L ranks takes a slice of ceil(n / L) (the last ones less, or none) over the slow link, so
    that a host's link carries one coded tensor an op, not one a rank. Both levels have groups of backend lowcomm of their
    own, `inside` and `between`, made here and ended by `destroy_process_group()`: ops of the program's other groups
    neither wait for these nor get between them, and no policy of the environment reaches them. `lc.stats(two.between)` is
    what this rank put on the slow link.

    One worker thread runs the ops in the order of issue, `async_op` or not. An op is two to four ops of groups, which all
    ranks must issue in one order: callbacks of futures, the way without a thread, run in any.

    An op that fails between hosts on one rank fails on all of them; where the reason was a value (a NaN) the next op works.
    A fault or a difference (of sizes, ops) inside a host is that of its reduce_scatter on the host's ranks, and comes to the
    other hosts at once as an op that differs, an all_gather: then the groups are over; make another TwoLevel.

    CUDA tensors are reduced inside a host by NCCL, on a stream beside the caller's; no GPU has run that.

    Args:
        mesh: Of two dimensions (a slice of a larger one will do); every rank in it makes the TwoLevel. Collective.
        codec: Codec text for what travels between hosts. Not by channel: what travels is flat.
        inside: Name of the mesh's dimension along a host's ranks.
        between: Name of its dimension along hosts.
        timeout: Progress deadline of both groups, also of how much later one slice of a tensor may cross the link than
            another. None for torch's default of a new group, half an hour.

    Raises:
        ValueError: A mesh, a name or a codec that will not do.
        DistBackendError: Ranks have different codecs or meshes, or one did not come.
    """

    def __init__(
        self, mesh: DeviceMesh, *, codec: str, inside: str, between: str, timeout: timedelta | None = None
    ) -> None:
        self._connect(hosts_of_mesh(mesh, inside, between), _rounding(codec), timeout)

    @classmethod
    def from_environment(cls, codec: str = "sym4:bucket=1024", *, timeout: timedelta | None = None) -> TwoLevel:
        """Over all ranks, hosts told apart as torchrun does: LOCAL_WORLD_SIZE ranks in a row are a host. Collective.

        Raises:
            ValueError: On every rank, when a rank has no such variable or another value, or LOCAL_RANK is not its place
                on the host.
            DistBackendError: As for the constructor.
        """
        if not dist.is_initialized():
            raise ValueError("TwoLevel: expected a process group: call init_process_group first")
        two = cls.__new__(cls)
        two._connect(hosts_of_environment(), _rounding(codec), timeout)
        return two

    def _connect(self, table: torch.Tensor, codec: str, timeout: timedelta | None) -> None:
        """Make the groups of this rank's row and column of the table [hosts, ranks of a host] of global ranks."""
        self._codec = codec
        host, place = (int(i) for i in (table == dist.get_rank()).nonzero()[0])
        self._hosts, self._locals = table.shape
        self._place = place
        policy = f"all_gather={self._codec}; reduce_scatter={self._codec}"
        # Hosts first on every rank: each group is made with its own members only.
        self.inside = _new_group(table[host].tolist(), timeout, _C.Options("", min_bytes=0))
        self._between(
            "a group between hosts",
            lambda: self._join_hosts(table[:, place].tolist(), timeout, _C.Options(policy, min_bytes=0)),
        )
        self._agree()
        self._queue = OpQueue("lowcomm-two-level")

    def _join_hosts(self, ranks: list[int], timeout: timedelta | None, options: _C.Options) -> None:
        self.between = _new_group(ranks, timeout, options)

    def _agree(self) -> None:
        """Ranks of a host are told of a difference; the hosts' groups compare their policies, that is their codecs."""
        mine = f"{self._codec} between {self._hosts} hosts of {self._locals} ranks"
        for place, theirs in enumerate(self._notes(mine)):
            if theirs != mine[:_NOTE_BYTES]:
                raise dist.DistBackendError(
                    f"TwoLevel: expected the same codec and mesh on all ranks, got {mine} on rank {dist.get_rank()} and "
                    f"{theirs} on rank {dist.get_global_rank(self.inside, place)}"
                )

    def slice_elements(self, numel: int) -> int:
        """How many of a tensor's `numel` elements this rank takes over the slow link in an all_reduce."""
        length = -(-numel // self._locals)
        return max(0, min(numel - self._place * length, length))

    def residual(self, like: torch.Tensor) -> Residual:
        """Error feedback for all_reduces of tensors of this size: of this rank's slice, zeros, one-dimensional."""
        return Residual(torch.empty(self.slice_elements(like.numel())))

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        *,
        residual: Residual | None = None,
        async_op: bool = False,
    ) -> Future[torch.Tensor] | None:
        """Reduce a tensor in place: exact inside the host to slices, those by codes between hosts, exact back together.

        All ranks of all hosts end with the same bits. Of raw n bytes a host sends about 2 n (hosts - 1) / hosts in codes.
        With one host nothing is coded. Collective.

        Args:
            tensor: float32, float16 or bfloat16, of one number of elements on all ranks; not to be touched until the end.
            op: SUM or AVG.
            residual: What `residual(tensor)` made, and this tensor's alone: over hosts and steps the sum of the hosts'
                sums (with AVG their means, and `hosts` times what was applied) is that of the residuals and of what was
                applied. It changes on all ranks when the op has succeeded between the hosts, else on none.
            async_op: Return a future at once. Its callbacks run on the worker, and must not wait for another op.

        Returns:
            With async_op the future of the tensor, whose wait() raises what the op did; else None.

        Raises:
            ValueError: Another op, a residual of another size or in use; of values (a NaN) on the ranks that sent them.
            TypeError: Another dtype.
            DistBackendError: Another rank could not send its part, ranks disagree, or a peer or the network failed.
        """
        op = _as_op(op)
        self._check("all_reduce", tensor, op)
        expected = self.slice_elements(tensor.numel())
        if residual is not None and residual.value.numel() != expected:
            raise ValueError(
                f"TwoLevel: all_reduce: expected a residual of this rank's slice, {expected} elements of "
                f"{tensor.numel()}, got one of {residual.value.numel()}"
            )
        return self._queue.issue(lambda: self._all_reduce(tensor.detach(), op, residual), [tensor], async_op)

    def _all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp, residual: Residual | None) -> None:
        flat = tensor.reshape(-1)  # a view where the tensor is contiguous
        slices = self._slices(flat)
        mine = slices[self._place]
        if self._locals > 1:
            mine = torch.empty_like(mine)
            self._reduce_inside(mine, slices, op)
        before = residual.value if residual is not None else None
        try:
            self._between("all_reduce", lambda: self._reduce_slice(mine, op, residual))
        except Exception:
            if residual is not None and residual.value is not before:
                residual._state.set(before)  # this slice has arrived, another has not
            raise
        if self._locals > 1:
            dist.all_gather(slices, mine, group=self.inside)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view_as(tensor))

    def _reduce_slice(self, mine: torch.Tensor, op: dist.ReduceOp, residual: Residual | None) -> None:
        if self._hosts > 1 and mine.numel():  # as long on every host
            all_reduce(mine, op, self.between, codec=self._codec, residual=residual)

    def _slices(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """A view a rank of the host; the last ones may be shorter, or empty."""
        length = -(-flat.numel() // self._locals)
        return [flat[place * length : (place + 1) * length] for place in range(self._locals)]

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, async_op: bool = False
    ) -> Future[torch.Tensor] | None:
        """Gather every rank's tensor, in the order of the mesh (host by host): by codes between hosts, then exact inside.

        A rank's tensor is coded once and leaves its host once for every other host. All ranks, the owner too, end with its
        decoded value; with one host nothing is coded. Collective.

        Args:
            output: hosts · ranks · n elements, contiguous, of the input's dtype.
            input: n elements, float32, float16 or bfloat16, as many on every rank.
            async_op: As for all_reduce.

        Returns:
            With async_op the future of the output, else None.

        Raises:
            ValueError: Sizes that do not fit; of values (a NaN) on the ranks that sent them.
            TypeError: Another dtype, or two.
            DistBackendError: As for all_reduce.
        """
        self._check("all_gather", input)
        self._check_whole("all_gather", "output", output, input)
        return self._queue.issue(lambda: self._all_gather(output.detach(), input.detach()), [output, input], async_op)

    def _all_gather(
        self, output: torch.Tensor, input: torch.Tensor, between: Callable[[torch.Tensor], Any] | None = None
    ) -> None:
        """`between` fills the column [hosts, n]; by the group's policy where it is left out."""
        column = input.new_empty(self._hosts, input.numel())  # the ranks at this place of every host
        gather = between or (lambda column: dist.all_gather(list(column), input.reshape(-1), group=self.between))
        self._between(
            "all_gather",
            lambda: gather(column),
            alone=lambda: column.copy_(input.reshape(1, -1)),
        )
        by_place = output.view(self._hosts, self._locals, input.numel()).unbind(1)
        if self._locals > 1:
            dist.all_gather(list(by_place), column, group=self.inside)
        else:
            by_place[0].copy_(column)

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, op: Any = dist.ReduceOp.SUM, *, async_op: bool = False
    ) -> Future[torch.Tensor] | None:
        """Reduce everybody's parts to the rank that each is for: exact inside the host, the sums by codes between hosts.

        A host's own sum for a rank of its own is not coded; with one host nothing is. Collective.

        Args:
            output: n elements, for this rank.
            input: hosts · ranks · n elements, contiguous, in the order of the mesh (host by host), of the output's dtype.
            op: SUM or AVG.
            async_op: As for all_reduce.

        Returns:
            With async_op the future of the output, else None.

        Raises:
            ValueError: Another op, or sizes that do not fit; of values (a NaN) on the ranks that sent them.
            TypeError: A dtype that is not float32, float16 or bfloat16, or two.
            DistBackendError: As for all_reduce.
        """
        op = _as_op(op)
        self._check("reduce_scatter", output, op)
        self._check_whole("reduce_scatter", "input", input, output)
        return self._queue.issue(
            lambda: self._reduce_scatter(output.detach(), input.detach(), op), [output, input], async_op
        )

    def _reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: dist.ReduceOp,
        between: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:
        """`between` reduces the column [hosts, n] of this host's sums to the output; by the policy where left out."""
        by_place = input.view(self._hosts, self._locals, output.numel()).unbind(1)
        column = input.new_empty(self._hosts, output.numel())  # this host's sums for this place of every host
        if self._locals > 1:
            self._reduce_inside(column, list(by_place), op)
        else:
            column.copy_(by_place[0])
        reduce = between or (lambda column: dist.reduce_scatter(output, list(column), op, group=self.between))
        self._between(
            "reduce_scatter",
            lambda: reduce(column),
            alone=lambda: output.copy_(column.view_as(output)),
        )

    def _check(self, name: str, tensor: torch.Tensor, op: dist.ReduceOp | None = None) -> None:
        """A caller's mistakes, before anything is sent."""
        if tensor.dtype not in _CODED:
            raise TypeError(f"TwoLevel: {name}: expected float32, float16 or bfloat16, got {tensor.dtype}")
        if op is not None and op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"TwoLevel: {name}: expected SUM or AVG, got {op}")

    def _check_whole(self, name: str, what: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        expected = self._hosts * self._locals * part.numel()
        if whole.dtype != part.dtype:
            raise TypeError(f"TwoLevel: {name}: expected an {what} of {part.dtype}, got {whole.dtype}")
        if whole.numel() != expected or not whole.is_contiguous():
            how = "" if whole.is_contiguous() else ", not contiguous"
            raise ValueError(
                f"TwoLevel: {name}: expected a contiguous {what} of {self._hosts} x {self._locals} x {part.numel()} = "
                f"{expected} elements, got {whole.numel()}{how}"
            )

    def _reduce_inside(self, output: torch.Tensor, inputs: list[torch.Tensor], op: dist.ReduceOp) -> None:
        try:
            dist.reduce_scatter(output, inputs, op, group=self.inside)
        except Exception:
            # The other hosts are about to wait for this one's sums. An op that is not theirs tells them at once.
            word = torch.zeros(1, dtype=torch.uint8)
            with contextlib.suppress(Exception):
                dist.all_gather([word.clone() for _ in range(self._hosts)], word, group=self.between, async_op=True)
            raise

    def _between(self, name: str, run: Callable[[], Any], alone: Callable[[], Any] | None = None) -> None:
        """Run an op's part between hosts, then hear how the host's other ranks fared: all fail when one did."""
        error = None
        try:
            run() if self._hosts > 1 or alone is None else alone()
        except Exception as e:
            error = e
        notes = self._notes(f"{type(error).__name__}: {error}" if error else "") if self._locals > 1 else []
        if error is not None:
            raise error
        for place, note in enumerate(notes):
            if note:
                raise dist.DistBackendError(
                    f"TwoLevel: {name}: expected every slice to arrive, got rank "
                    f"{dist.get_global_rank(self.inside, place)}'s not: {note}"
                )

    def _notes(self, mine: str) -> list[str]:
        """What each of the host's ranks says, cut to _NOTE_BYTES."""
        said = mine.encode(errors="replace")[:_NOTE_BYTES].ljust(_NOTE_BYTES, b"\0")
        everybodys = [torch.empty(_NOTE_BYTES, dtype=torch.uint8) for _ in range(self._locals)]
        dist.all_gather(everybodys, torch.frombuffer(bytearray(said), dtype=torch.uint8), group=self.inside)
        return [bytes(note.tolist()).rstrip(b"\0").decode(errors="ignore") for note in everybodys]


def _rounding(codec: str) -> str:
    """The text of a codec that a TwoLevel is made for."""
    spec = checked_codec(codec).spec
    if spec == "none" or "axis=channel" in spec:
        raise ValueError(f"TwoLevel: expected a codec that rounds, in buckets of a flat tensor, got {spec!r}")
    return spec


def _as_op(op: Any) -> dist.ReduceOp:
    return op if isinstance(op, dist.ReduceOp) else dist.ReduceOp(op)


def _new_group(ranks: list[int], timeout: timedelta | None, options: _C.Options) -> dist.ProcessGroup:
    return dist.new_group(ranks, timeout=timeout, backend="lowcomm", pg_options=options, use_local_synchronization=True)
