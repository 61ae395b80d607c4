"""Learned levels (QSDP, arXiv 2302.02390, Algorithm 2): the values to which a `levels<b>` codec rounds, for each tensor.

Every tensor begins with even levels. At given optimizer steps each rank learns levels from the elements that it is about to
encode, and the ranks agree on the mean. So a tensor has one table in a group, the same on every rank, and a reader's table
is the sender's. The table is in the layout's text, and every op's description and frame carry a hash of this text: an error
names a rank with another table.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torch_lowcomm import _C
from torch_lowcomm._torch_names import all_gather_single
from torch_lowcomm.groups import exact

PAPERS_STEPS = (400, 1900, 3800)  # of 4800
MOST_UNLEARNED = 100_000  # elements; a smaller tensor's share of the bytes is not worth a table


@dataclass(frozen=True)
class ParameterRun:
    """One parameter's run in a flat buffer."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter, over all ranks
    first: int  # element of the flat buffer
    count: int  # elements a rank contributes, padding included
    codec: str


def learning_steps(steps: Sequence[int] | None, codecs: Sequence[str]) -> tuple[int, ...]:
    """Returns the optimizer steps at which levels are learned: `steps`, or by default the paper's if a codec has levels."""
    has_levels = any(codec.startswith("levels") for codec in codecs)
    if steps is None:
        return PAPERS_STEPS if has_levels else ()
    given = tuple(steps) if isinstance(steps, Sequence) else ()
    rising = all(isinstance(s, int) for s in given) and list(given) == sorted({s for s in given if s >= 0})
    if not rising or not isinstance(steps, Sequence):
        raise ValueError(
            f"fsdp.quantize: learn_at: expected optimizer steps, 0 or more, in ascending order, got {steps!r}"
        )
    if given and not has_levels:
        raise ValueError(
            f"fsdp.quantize: learn_at: expected none without a levels codec, got {given} with {' and '.join(codecs)}"
        )
    return given


class Levels:
    """The level tables of the runs of one flat buffer, and the layout that has them."""

    def __init__(self, runs: Sequence[ParameterRun], learn_at: Sequence[int]) -> None:
        self._runs = list(runs)
        self._learn_at = frozenset(learn_at)
        self._learned_at = -1  # the step whose tables these are
        self._tables = {
            i: _C.even_levels(_C.Codec(run.codec).bits)
            for i, run in enumerate(self._runs)
            if run.codec.startswith("levels")
        }
        self._learning = [i for i in self._tables if math.prod(self._runs[i].shape) > MOST_UNLEARNED]
        self.layout = self._make_layout(self._tables)

    def _make_layout(self, tables: dict[int, _C.LevelTable]) -> _C.Layout:
        return _C.Layout(
            [(run.first, run.count, run.codec) for run in self._runs],
            [tables.get(i) for i in range(len(self._runs))],
        )

    def at(self, step: int, buffers: Sequence[torch.Tensor], group: dist.ProcessGroup) -> _C.Layout:
        """Returns the layout at an optimizer step. Where learning is due it learns first, which is collective over `group`,
        from buffers of [elements of the layout] that are about to be encoded; buckets do not cross buffers.
        """
        due = max((s for s in self._learn_at if s <= step), default=-1)  # late if that step's buffer was sent exactly
        if self.learns and due > self._learned_at:
            self._set(self._agreed(self._learn(buffers), group), step)
        return self.layout

    def _learn(self, buffers: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns [learning runs, 2^b + 1]: the levels, then the number of elements seen; float64 holds both exactly."""
        learned = []
        for i in self._learning:
            run = self._runs[i]
            learning = _C.LevelLearning(self._tables[i], _C.Codec(run.codec).bucket)
            for buffer in buffers:
                learning.see(buffer.detach()[run.first : run.first + run.count].to("cpu", torch.float32))
            seen = torch.tensor([learning.seen], dtype=torch.float64)
            learned.append(torch.cat([learning.table(0).values.double(), seen]))
        return torch.stack(learned)

    def _agreed(self, mine: torch.Tensor, group: dist.ProcessGroup) -> dict[int, _C.LevelTable]:
        everyones = mine.new_empty(group.size() * mine.numel())
        with exact():
            all_gather_single(everyones, mine.flatten(), group=group)
        tables = dict(self._tables)
        for k, i in enumerate(self._learning):
            of_ranks = everyones.view(group.size(), *mine.shape)[:, k]
            version = self._tables[i].version + 1
            tables[i] = _C.mean_levels(
                [_C.LevelTable(row[:-1].float(), version) for row in of_ranks],
                [int(row[-1]) for row in of_ranks],
                self._tables[i],
                version,
            )
        return tables

    def _set(self, tables: dict[int, _C.LevelTable], step: int) -> None:
        self.layout = self._make_layout(tables)
        self._tables, self._learned_at = tables, step

    @property
    def learns(self) -> bool:
        """Whether the levels of any tensor are learned."""
        return bool(self._learning)

    def state_dict(self) -> dict[str, Any]:
        """Returns {"tensors": identities, "levels": [tensors, 2^b], "versions", "learned_at": optimizer step}."""
        tables = [self._tables[i] for i in self._learning]
        return {
            "tensors": [self._identity(i) for i in self._learning],
            "levels": torch.stack([table.values for table in tables]),
            "versions": [table.version for table in tables],
            "learned_at": self._learned_at,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the tables of a checkpoint of a run on any number of ranks. It raises as `check`, with nothing changed."""
        self._set(self.check(state), int(state["learned_at"]))

    def check(self, state: dict[str, Any]) -> dict[int, _C.LevelTable]:
        """Returns the tables in a checkpoint's state; refuses those of another model or codec by the first difference."""
        mine, theirs = [self._identity(i) for i in self._learning], list(state["tensors"])
        for ours, other in itertools.zip_longest(mine, theirs, fillvalue="no other tensor"):
            if ours != other:
                raise ValueError(f"fsdp: level tables: expected those of {ours}, got {other}")
        values = zip(self._learning, state["levels"], state["versions"], strict=True)
        return self._tables | {i: _C.LevelTable(row.contiguous(), int(version)) for i, row, version in values}

    def _identity(self, i: int) -> str:
        run = self._runs[i]
        return f"{run.name} {list(run.shape)} {run.codec}"
