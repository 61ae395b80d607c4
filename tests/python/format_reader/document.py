"""The pages themselves: their fenced examples and its tables of numbers, so that nothing is copied from it by hand."""

import functools
import re
from pathlib import Path

import numpy as np

from format_reader.refusal import F32, U32

PAGES = sorted((Path(__file__).resolve().parents[3] / "csrc" / "wire").glob("FORMAT*.md"))


@functools.cache
def page() -> str:
    """The pages' text, one behind another."""
    return "\n".join(path.read_text(encoding="utf-8") for path in PAGES)


def fenced(name: str) -> str:
    """The one fenced block of the page that has this name."""
    (found,) = re.findall(rf"^```{name}\n(.*?)^```", page(), re.MULTILINE | re.DOTALL)
    return found


@functools.cache
def gauss_levels(bits: int) -> F32:
    """The 2^bits levels of gauss, ascending: the page has those above 0, and they mirror."""
    rows: dict[int, list[str]] = {}
    for word in fenced("gauss").split():
        if word.endswith(":"):
            row = rows.setdefault(int(word[:-1]), [])
        else:
            row.append(word)
    above = np.array(rows[bits], dtype=np.float32)
    assert above.size == 2 ** (bits - 1)
    return np.concatenate([-above[::-1], above])


@functools.cache
def sign_words() -> U32:
    """The words of signs of the 16 lanes of a rotated block."""
    (found,) = re.findall(r"counters 0, 1, 2, 3, four words each:\n\n((?:    .*\n)+)", page())
    words = np.array([int(word, 16) for word in found.split()], dtype=np.uint32)
    assert words.size == 16
    return words


def table_after(heading: str) -> list[list[str]]:
    """The cells of the first table whose header row starts with `heading`, without its two header rows."""
    lines = page().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(heading))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows
