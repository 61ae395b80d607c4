"""The two levels of ranks behind one link: hosts and the ranks of a host, with a group of each kind for every rank."""

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_lowcomm import _C

_BLOCK = 512  # elements: collectives cut slices at such blocks
_NOTE_BYTES = 512  # of the text in which ranks of a host tell one another how an op's part between hosts ended


class HostLevels:
    """The two levels of a rank: ops inside its host are exact, and their part between hosts fails on all its ranks or on none.

    Collective: every rank in the table makes one, else it is a DistBackendError, as a difference of tables is. The table has
    the global ranks [hosts, ranks of a host].

    Attributes:
        inside: The ranks of this host.
        between: The ranks at this rank's place of every host.
        hosts: Number of hosts.
        ranks: Number of ranks of a host.
        rows: The table as lists.
        place: This rank's place on its host.
    """

    between: dist.ProcessGroup

    def __init__(self, table: torch.Tensor, timeout: timedelta | None) -> None:
        host, self.place = (int(i) for i in (table == dist.get_rank()).nonzero()[0])
        self.hosts, self.ranks = table.shape
        self.rows: list[list[int]] = table.tolist()
        # Hosts first on every rank: each group is made with its own members only.
        self.inside = _new_group(table[host].tolist(), timeout)

        def join() -> None:
            self.between = _new_group(table[:, self.place].tolist(), timeout)

        self.run_between("a group between hosts", join)
        self.expect_same("hosts", f"{self.hosts} hosts of {self.ranks} ranks")

    def expect_same(self, what: str, mine: str) -> None:
        """Compares a text inside this host; DistBackendError where ranks differ."""
        for place, theirs in enumerate(self._notes(mine)):
            if theirs != mine[:_NOTE_BYTES]:
                raise dist.DistBackendError(
                    f"hosts: expected the same {what} on all ranks of a host, got {mine} on rank {dist.get_rank()} and "
                    f"{theirs} on rank {dist.get_global_rank(self.inside, place)}"
                )

    def cut(self, numel: int, turn: int, *, whole: bool = False) -> list[tuple[int, int]]:
        """Returns the elements [begin, end) of a tensor for which each place of a host sends: equal shares of whole blocks, which
        small tensors and `whole` ones leave to one place, `turn` by `turn` to another.
        """
        length = max(1, numel if whole else -(-numel // (_BLOCK * self.ranks)) * _BLOCK)
        ends = [min(numel, length * place) for place in range(self.ranks + 1)]
        return [(ends[at], ends[at + 1]) for at in ((place - turn) % self.ranks for place in range(self.ranks))]

    def average_inside(self, tensor: torch.Tensor) -> None:
        """Averages a tensor over the ranks of this host, exactly."""
        tensor.mul_(1.0 / self.ranks)
        self._run_inside(lambda: dist.all_reduce(tensor, group=self.inside))

    def share(self, pieces: Sequence[Sequence[torch.Tensor]]) -> None:
        """Hands out inside this host what each place's rank has in its pieces; `pieces` are by place, flat and contiguous."""
        # As bytes: pieces of several types travel together.
        of_places = [[piece.view(torch.uint8) for piece in of_place if piece.numel()] for of_place in pieces]
        some = pieces[self.place][0] if pieces[self.place] else torch.empty(0)
        wholes = [torch.cat(found) if found else some.new_empty(0, dtype=torch.uint8) for found in of_places]
        dist.all_gather(wholes, wholes[self.place].clone(), group=self.inside)
        for place, (whole, found) in enumerate(zip(wholes, of_places, strict=True)):
            for piece, came in zip(found, whole.split([len(piece) for piece in found]), strict=True):
                if place != self.place:
                    piece.copy_(came)

    def reduce_inside(self, output: torch.Tensor, inputs: list[torch.Tensor], op: dist.ReduceOp) -> None:
        """Reduces the inputs of this host's ranks, one for each of them, exactly."""
        self._run_inside(lambda: dist.reduce_scatter(output, inputs, op, group=self.inside))

    def _run_inside(self, run: Callable[[], Any]) -> None:
        """Runs an op inside this host whose result is for the other hosts, too."""
        try:
            run()
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
        self.settle(name, error)

    def settle(self, name: str, error: Exception | None, text: str = "") -> str:
        """Learns how an op's part between hosts ended on the host's ranks: raises this rank's error, or tells another's, else
        returns the first text that is not empty.
        """
        notes = self._notes(f"!{type(error).__name__}: {error}" if error else f" {text}") if self.ranks > 1 else []
        if error is not None:
            raise error
        for place, note in enumerate(notes):
            if note.startswith("!"):
                raise dist.DistBackendError(
                    f"hosts: {name}: expected every slice to arrive, got rank "
                    f"{dist.get_global_rank(self.inside, place)}'s not: {note[1:]}"
                )
        return next((note[1:] for note in notes if note[1:]), text)

    def _notes(self, mine: str) -> list[str]:
        """Returns the text of each rank of the host, cut to _NOTE_BYTES."""
        said = mine.encode(errors="replace")[:_NOTE_BYTES].ljust(_NOTE_BYTES, b"\0")
        everybodys = [torch.empty(_NOTE_BYTES, dtype=torch.uint8) for _ in range(self.ranks)]
        dist.all_gather(everybodys, torch.frombuffer(bytearray(said), dtype=torch.uint8), group=self.inside)
        return [bytes(note.tolist()).rstrip(b"\0").decode(errors="ignore") for note in everybodys]


def _new_group(ranks: list[int], timeout: timedelta | None) -> dist.ProcessGroup:
    options = _C.Options("", min_bytes=0)
    return dist.new_group(ranks, timeout=timeout, backend="lowcomm", pg_options=options, use_local_synchronization=True)
