"""Ranks behind one link: hosts and the ranks of a host, with a group of each kind for every rank."""

import contextlib
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torch_lowcomm import _C

_NOTE_BYTES = 512  # of the text in which ranks of a host tell one another how an op's part between hosts ended


class HostLevels:
    """The two levels of a rank: ops inside its host are exact, and their part between hosts fails on all its ranks or on none.

    Collective: every rank in the table makes one, else it is a DistBackendError, as a difference of codecs or tables is. The
    table has the global ranks [hosts, ranks of a host]; the codec is that of all_gather and reduce_scatter between hosts.

    Attributes:
        inside: The ranks of this host.
        between: The ranks at this rank's place of every host.
        hosts: Number of hosts.
        ranks: Number of ranks of a host.
        place: This rank's place on its host.
    """

    between: dist.ProcessGroup

    def __init__(self, table: torch.Tensor, codec: str, timeout: timedelta | None) -> None:
        host, self.place = (int(i) for i in (table == dist.get_rank()).nonzero()[0])
        self.hosts, self.ranks = table.shape
        # Hosts first on every rank: each group is made with its own members only.
        self.inside = _new_group(table[host].tolist(), timeout, "")

        def join() -> None:
            policy = f"all_gather={codec}; reduce_scatter={codec}"
            self.between = _new_group(table[:, self.place].tolist(), timeout, policy)

        self.run_between("a group between hosts", join)
        self._compare(f"{codec} between {self.hosts} hosts of {self.ranks} ranks")

    def _compare(self, mine: str) -> None:
        """Compares codec and table inside a host; the groups between hosts compare their policies, which have the codec."""
        for place, theirs in enumerate(self._notes(mine)):
            if theirs != mine[:_NOTE_BYTES]:
                raise dist.DistBackendError(
                    f"TwoLevel: expected the same codec and mesh on all ranks, got {mine} on rank {dist.get_rank()} and "
                    f"{theirs} on rank {dist.get_global_rank(self.inside, place)}"
                )

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, between: Callable[[torch.Tensor], Any] | None = None
    ) -> None:
        """Gathers [n] of every rank into [hosts · ranks · n], host by host. `between` fills the column [hosts, n] of the ranks at
        this place; by default the group's policy does.
        """
        column = input.new_empty(self.hosts, input.numel())  # of the ranks at this place of every host
        gather = between or (lambda column: dist.all_gather(list(column), input.reshape(-1), group=self.between))
        self.run_between(
            "all_gather",
            lambda: gather(column),
            alone=lambda: column.copy_(input.reshape(1, -1)),
        )
        by_place = output.view(self.hosts, self.ranks, input.numel()).unbind(1)
        if self.ranks > 1:
            dist.all_gather(list(by_place), column, group=self.inside)
        else:
            by_place[0].copy_(column)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: dist.ReduceOp,
        between: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:
        """Reduces [hosts · ranks · n], host by host, to this rank's [n], by SUM or AVG, or PREMUL_SUM where `between` does not
        apply the factor again. It reduces the column [hosts, n] of this host's sums; by default the group's policy does.
        """
        by_place = input.view(self.hosts, self.ranks, output.numel()).unbind(1)
        column = input.new_empty(self.hosts, output.numel())  # this host's sums for this place of every host
        if self.ranks > 1:
            self.reduce_inside(column, list(by_place), op)
        else:
            column.copy_(by_place[0])
        reduce = between or (lambda column: dist.reduce_scatter(output, list(column), op, group=self.between))
        self.run_between(
            "reduce_scatter",
            lambda: reduce(column),
            alone=lambda: output.copy_(column.view_as(output)),
        )

    def reduce_inside(self, output: torch.Tensor, inputs: list[torch.Tensor], op: dist.ReduceOp) -> None:
        """Reduces the inputs of this host's ranks, one for each of them, exactly."""
        try:
            dist.reduce_scatter(output, inputs, op, group=self.inside)
        except Exception:
            # The other hosts are about to wait for this host's sums. An op that differs from theirs tells them at once.
            word = torch.zeros(1, dtype=torch.uint8)
            with contextlib.suppress(Exception):
                dist.all_gather([word.clone() for _ in range(self.hosts)], word, group=self.between, async_op=True)
            raise

    def run_between(self, name: str, run: Callable[[], Any], alone: Callable[[], Any] | None = None) -> None:
        """Runs an op's part between hosts, then learns how it ended on the host's other ranks: all fail if one did."""
        error = None
        try:
            run() if self.hosts > 1 or alone is None else alone()
        except Exception as e:
            error = e
        notes = self._notes(f"{type(error).__name__}: {error}" if error else "") if self.ranks > 1 else []
        if error is not None:
            raise error
        for place, note in enumerate(notes):
            if note:
                raise dist.DistBackendError(
                    f"TwoLevel: {name}: expected every slice to arrive, got rank "
                    f"{dist.get_global_rank(self.inside, place)}'s not: {note}"
                )

    def _notes(self, mine: str) -> list[str]:
        """Returns the text of each rank of the host, cut to _NOTE_BYTES."""
        said = mine.encode(errors="replace")[:_NOTE_BYTES].ljust(_NOTE_BYTES, b"\0")
        everybodys = [torch.empty(_NOTE_BYTES, dtype=torch.uint8) for _ in range(self.ranks)]
        dist.all_gather(everybodys, torch.frombuffer(bytearray(said), dtype=torch.uint8), group=self.inside)
        return [bytes(note.tolist()).rstrip(b"\0").decode(errors="ignore") for note in everybodys]


def _new_group(ranks: list[int], timeout: timedelta | None, policy: str) -> dist.ProcessGroup:
    options = _C.Options(policy, min_bytes=0)
    return dist.new_group(ranks, timeout=timeout, backend="lowcomm", pg_options=options, use_local_synchronization=True)


def hosts_of_mesh(mesh: DeviceMesh, inside: str, between: str) -> torch.Tensor:
    """Returns the global ranks [hosts, ranks of a host] of a mesh with these two dimensions; another mesh, or one without this
    rank, is a ValueError.
    """
    names = mesh.mesh_dim_names or ()
    if mesh.ndim != 2 or set(names) != {inside, between}:
        raise ValueError(
            f"TwoLevel: expected a mesh of the two dimensions {between!r} and {inside!r}, got {mesh.ndim} named {names}"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"TwoLevel: expected a mesh with rank {dist.get_rank()} in it, got {mesh.mesh.tolist()}")
    table = mesh.mesh.cpu()
    return table if names[0] == between else table.t()


def hosts_of_environment() -> torch.Tensor:
    """Returns the global ranks [hosts, ranks of a host] from torchrun's variables LOCAL_WORLD_SIZE and LOCAL_RANK.

    Collective: every rank gets the variables of all ranks, so that all raise or none. A variable that is missing on a rank,
    hosts of different sizes, and a rank that is not in its place are ValueErrors.
    """
    said = (os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"))
    mine = torch.tensor([int(text) if text.isdigit() else -1 for text in said])
    everybodys = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybodys, mine)
    size, local = len(everybodys), int(everybodys[0][0])
    for rank, (found, place) in enumerate(row.tolist() for row in everybodys):
        if found < 1 or found != local:
            first, has = (str(count) if count >= 1 else "none" for count in (local, found))
            raise ValueError(
                f"TwoLevel: expected as many ranks on every host, got LOCAL_WORLD_SIZE {first} on rank 0 and {has} on rank "
                f"{rank} (torchrun sets it)"
            )
        if place != rank % local:
            raise ValueError(
                f"TwoLevel: expected LOCAL_RANK {rank % local} on rank {rank} of hosts of {local}, got {place}"
            )
    if size % local:
        raise ValueError(
            f"TwoLevel: expected a world of full hosts of LOCAL_WORLD_SIZE {local} ranks, got {size} ranks"
        )
    return torch.arange(size).view(-1, local)
