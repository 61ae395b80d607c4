"""The pages benchmarks/results/*.md: prose that somebody wrote around blocks that the programs printed.

A block stands behind the line `<!-- output of NAME -->`, where NAME.json is the result. A program that writes NAME.json puts what
it printed into that block, so that a page never shows another run than the JSON holds. A page may come before its first
result: the line `<!-- no output of NAME yet -->` then stands where the block will.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TextIO

RESULTS = Path(__file__).parent / "results"
_BLOCK = "<!-- output of {} -->\n```\n"
_NONE_YET = "<!-- no output of {} yet -->\n"
_BLOCKS = re.compile(r"^<!-- output of (\w+) -->\n```\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Transcript:
    """Standard output, of which it keeps a copy."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._printed: list[str] = []

    def write(self, text: str) -> int:
        """Passes text on, and keeps it."""
        self._printed.append(text)
        return self._stream.write(text)

    def flush(self) -> None:
        """Flushes what it passes text on to."""
        self._stream.flush()

    @property
    def text(self) -> str:
        """Everything that was printed since `begin`."""
        return "".join(self._printed)

    @classmethod
    def begin(cls) -> None:
        """Keeps what is printed from here on; what was kept before is forgotten."""
        if isinstance(sys.stdout, Transcript):
            sys.stdout._printed.clear()
        else:
            sys.stdout = cls(sys.stdout)


def blocks(page: str) -> list[tuple[str, str]]:
    """(NAME, what the program printed) of every block of a page."""
    return _BLOCKS.findall(page)


def update(name: str, printed: str, folder: Path = RESULTS) -> Path | None:
    """Puts what a program printed into the block of that name; returns the page, None where no page has such a block."""
    begin = _BLOCK.format(name)
    for path in sorted(folder.glob("*.md")):
        page = path.read_text().replace(_NONE_YET.format(name), f"{begin}```\n")
        before, found, after = page.partition(begin)
        if found:
            rest = after[after.index("\n```", 0) + 1 :] if not after.startswith("```") else after
            path.write_text(before + begin + printed.rstrip("\n") + "\n" + rest)
            return path
    return None
