"""The output of a bench: nccl-tests' table with further columns, and JSON."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_lowcomm.cli.machine import machine, versions

# (name, unit, width, field, format) of each column; a parser of the table reads names from the line that has "size".
_COLUMNS = [
    ("size", "(B)", 12, "size_bytes", "d"),
    ("count", "(elements)", 12, "count", "d"),
    ("type", "", 10, "type", ""),
    ("redop", "", 8, "redop", ""),
    ("root", "", 6, "root", "d"),
    ("time", "(us)", 10, "time_us", ".1f"),
    ("algbw", "(GB/s)", 8, "algbw_gb_s", ".2f"),
    ("busbw", "(GB/s)", 8, "busbw_gb_s", ".2f"),
    ("#wrong", "", 8, "wrong", "d"),
    ("min", "(us)", 10, "min_us", ".1f"),
    ("spread", "(%)", 7, "spread", ".0%"),
    ("wire", "(B)", 11, "wire_bytes", ".0f"),
    ("ratio", "", 7, "ratio", ".2f"),
    ("rel.err", "", 9, "relative_error", ".2e"),
    ("encode", "(us)", 9, "encode_us", ".0f"),
    ("decode", "(us)", 9, "decode_us", ".0f"),
    ("ideal", "(%)", 7, "share_of_ideal", ".1%"),
    ("x peer", "", 8, "times_peer", ".2f"),
]
_COLUMN_WIDTHS = [width for _, _, width, _, _ in _COLUMNS]


def columns() -> str:
    """Returns the two lines above the rows."""
    return "\n".join("#" + aligned([column[part] for column in _COLUMNS], _COLUMN_WIDTHS)[1:] for part in (0, 1))


def aligned(cells: Sequence[Any], widths: Sequence[int]) -> str:
    """Returns a line of cells at the right of their columns, N/A for None."""
    return "".join(f"{'N/A' if cell is None else cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def line(row: dict[str, Any]) -> str:
    """Returns a row of the table."""
    fields = [(row[field], form) for _, _, _, field, form in _COLUMNS]
    return aligned([None if x is None else format(x, form).rstrip("%") for x, form in fields], _COLUMN_WIDTHS)


def closing(rows: list[dict[str, Any]]) -> str:
    """Returns the `#` lines under the rows, as in nccl-tests."""
    wrong = wrong_of(rows)
    mean = statistics.mean(row["busbw_gb_s"] for row in rows)
    return f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}\n# Avg bus bandwidth    : {mean:.4f} GB/s"


def wrong_of(rows: list[dict[str, Any]]) -> int:
    """Returns the number of wrong elements in all measurements, the peer's too."""
    return sum(of["wrong"] for row in rows for of in (row, row["peer"]) if of)


def write_json(path: Path, **content: Any) -> None:
    """Writes versions, machine and the content as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"versions": versions(), "machine": machine(), **content}, indent=1) + "\n")
