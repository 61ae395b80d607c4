"""The output of a bench: nccl-tests' table with further columns, and JSON."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_lowcomm.cli.machine import machine, versions

# (name, unit, width) of each column; a parser of the table reads names from the line that has "size".
_FIRST = [("size", "(B)", 12), ("count", "(elements)", 12), ("type", "", 10), ("redop", "", 8), ("root", "", 6)]
_FORM = [("time", "(us)", 10), ("algbw", "(GB/s)", 8), ("busbw", "(GB/s)", 8), ("#wrong", "", 8)]
_MORE = [
    ("min", "(us)", 10),
    ("spread", "(%)", 7),
    ("wire", "(B)", 11),
    ("ratio", "", 7),
    ("rel.err", "", 9),
    ("encode", "(us)", 9),
    ("decode", "(us)", 9),
    ("ideal", "(%)", 7),
    ("x peer", "", 8),
]


def columns() -> str:
    """Returns the three lines above the rows."""
    form = sum(width for _, _, width in _FORM)
    lines = ["#" + " " * (sum(w for _, _, w in _FIRST) - 1) + f"{'out-of-place':>{form}}{'in-place':>{form}}"]
    all_columns = [*_FIRST, *_FORM, *_FORM, *_MORE]
    widths = [width for _, _, width in all_columns]
    lines += ["#" + aligned([column[part] for column in all_columns], widths)[1:] for part in (0, 1)]
    return "\n".join(lines)


def aligned(cells: Sequence[Any], widths: Sequence[int]) -> str:
    """Returns a line of cells at the right of their columns, N/A for None."""
    return "".join(f"{'N/A' if cell is None else cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def line(row: dict[str, Any]) -> str:
    """Returns a row of the table; N/A where there is no value. The last columns are those of the first form."""
    cells = [row["size_bytes"], row["count"], row["type"], row["redop"], row["root"]]
    for form in (row["out_of_place"], row["in_place"]):
        if form is None:
            cells += [None] * 4
        else:
            cells += [
                f"{form['time_us']:.1f}",
                *(f"{form[k]:.2f}" for k in ("algbw_gb_s", "busbw_gb_s")),
                form["wrong"],
            ]
    form = first_form(row)
    cells += [
        f"{form['min_us']:.1f}",
        f"{form['spread'] * 100:.0f}",
        _number(form["wire_bytes"], ".0f"),
        _number(form["ratio"], ".2f"),
        _number(form["relative_error"], ".2e"),
        _number(form["encode_us"], ".0f"),
        _number(form["decode_us"], ".0f"),
        _number(form["share_of_ideal"], ".1%").rstrip("%"),
        _number(form["times_peer"], ".2f"),
    ]
    return aligned(cells, [width for _, _, width in (*_FIRST, *_FORM, *_FORM, *_MORE)])


def first_form(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the out-of-place measurement, or the in-place one if the op has no other."""
    form: dict[str, Any] = row["out_of_place"] or row["in_place"]
    return form


def forms_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the group's measurements of all rows."""
    return [row[form] for row in rows for form in ("out_of_place", "in_place") if row[form]]


def closing(rows: list[dict[str, Any]]) -> str:
    """Returns the `#` lines under the rows, as in nccl-tests."""
    wrong = wrong_of(rows)
    own = [form["busbw_gb_s"] for form in forms_of(rows)]
    return "\n".join(
        (
            "# Out of bounds values : "
            + ("not checked" if wrong is None else f"{wrong} {'FAILED' if wrong else 'OK'}"),
            f"# Avg bus bandwidth    : {sum(own) / len(own):.4f} GB/s",
        )
    )


def wrong_of(rows: list[dict[str, Any]]) -> int | None:
    """Returns the number of wrong elements in all measurements, the peer's too; None if nothing was checked."""
    own = forms_of(rows)
    found = [form["wrong"] for form in (*own, *(form["peer"] for form in own)) if form and form["wrong"] is not None]
    return sum(found) if found else None


def write_json(path: Path, **content: Any) -> None:
    """Writes versions, machine and the content as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"versions": versions(), "machine": machine(), **content}, indent=1) + "\n")


def _number(value: float | None, form: str) -> str:
    return "N/A" if value is None else format(value, form)
