"""Tables as text."""

from collections.abc import Iterable, Sequence


def aligned(heads: str, rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns lines with aligned columns, those of numbers at the right; `heads` are divided by "|"."""
    rows = [heads.split("|"), *rows]
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(cell[:1].isdigit() or cell == "-" for cell in of) and set(of) != {"-"} for _, *of in columns]
    pads = [str.rjust if at_right else str.ljust for at_right in right]
    return ["  ".join(map(lambda pad, cell, width: pad(cell, width), pads, row, widths)).rstrip() for row in rows]


def spans(numbers: Iterable[int]) -> str:
    """Returns numbers as "0-2, 5"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
