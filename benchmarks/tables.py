"""Tables of results: rows of fixed width as a program goes on, and whole ones, which its JSON keeps and a page shows."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any


class Columns:
    """The heading and the rows of a table that is printed while it is measured.

    Args:
        columns: Each one's heading, width and format, as in "run 28 | seconds 9.1f"; the first one is aligned to the left.
            None is shown as "-".
    """

    def __init__(self, columns: str) -> None:
        self._columns = []
        for column in columns.split(" | "):
            name, _, form = column.rpartition(" ")
            width = re.match(r"\d+", form)
            assert width, column
            self._columns.append((name, int(width[0]), form[width.end() :]))

    def heading(self) -> str:
        """A comment."""
        return "# " + self._aligned([name for name, _, _ in self._columns])

    def row(self, *cells: Any) -> str:
        """A line of as many cells as there are columns."""
        return "  " + self._aligned(
            [
                "-" if cell is None else format(cell, form)
                for cell, (_, _, form) in zip(cells, self._columns, strict=True)
            ]
        )

    def _aligned(self, texts: Sequence[str]) -> str:
        widths = [width for _, width, _ in self._columns]
        rest = "".join(f"{text:>{width}}" for text, width in zip(texts[1:], widths[1:], strict=True))
        return f"{texts[0]:<{widths[0]}}{rest}".rstrip()


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
