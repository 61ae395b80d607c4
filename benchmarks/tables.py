"""A table of results: printed below a program's rows, kept in its JSON, and shown on a page under results/ as it is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Table:
    """Cells as they are printed, a row a sequence of as many as there are columns."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        """Fixed-width lines, each a comment as all but a program's own rows are."""
        lines = [self.columns, *self.rows]
        widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
        aligned = ("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines)
        return "\n".join([f"# {self.title}", *(f"#   {line.rstrip()}" for line in aligned)])

    def markdown(self) -> list[str]:
        """The lines of a page's table: columns, rule, rows."""
        rule = "| " + " | ".join("---" for _ in self.columns) + " |"
        first, *others = (f"| {' | '.join(line)} |" for line in (self.columns, *self.rows))
        return [first, rule, *others]


def of_json(content: Mapping[str, Any]) -> list[Table]:
    """The tables that a result's JSON holds under `tables`."""
    return [Table(**table) for table in content.get("tables", [])]


def to_json(tables: Sequence[Table]) -> list[dict[str, Any]]:
    """Returns the value of `tables` in a result's JSON."""
    return [dataclasses.asdict(table) for table in tables]
