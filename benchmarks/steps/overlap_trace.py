"""Exposed communication by a profiler's trace: the time in which an op of lowcomm is under way and nothing computes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

OPS = ("lowcomm::all_gather", "lowcomm::reduce_scatter")

Stretch = tuple[float, float]


def exposed_ms(events: Iterable[Any]) -> float:
    """Milliseconds within any of OPS and outside every `aten::` op.

    Args:
        events: Of a torch.profiler.profile, of all threads: ranges of lowcomm's ops are on its worker's.
    """
    communicates, computes = [], []
    for event in events:
        stretch = (event.time_range.start, event.time_range.end)  # microseconds
        if event.name in OPS:
            communicates.append(stretch)
        elif event.name.startswith("aten::"):
            computes.append(stretch)
    both = union([*communicates, *computes])
    return (length(both) - length(union(computes))) / 1e3


def union(stretches: list[Stretch]) -> list[Stretch]:
    """The same points in stretches that do not touch."""
    merged: list[Stretch] = []
    for start, end in sorted(stretches):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(stretches: list[Stretch]) -> float:
    """Of stretches that do not overlap, all together."""
    return sum(end - start for start, end in stretches)
