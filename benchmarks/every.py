"""Runs every program that README.md lists, one after the other, and says which of them failed.

python benchmarks every [--list] [WORD…]     # `make bench`; WORD: those whose command has one of these words

A program runs without options, so it prints its rows and gates and records nothing. Some ask for root, packages or a GPU,
and end with a sentence where these are missing.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

_HERE = Path(__file__).parent


def commands(page: str | None = None) -> list[str]:
    """The commands of README.md's tables, or of another text's: what stands in the first cell as code, before a bracket."""
    page = (_HERE / "README.md").read_text() if page is None else page
    cells = re.findall(r"^\| ([^|]*) \|", page, re.MULTILINE)
    return [command for cell in cells for command in re.findall(r"`([^`]+)`", cell.partition("(")[0])]


def main() -> int:
    """Runs them; the exit status is 1 when one failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="only commands that have one of these words")
    parser.add_argument("--list", action="store_true", help="print the commands")
    args = parser.parse_args()
    chosen = [command for command in commands() if not args.words or set(args.words) & set(command.split())]
    if args.list:
        print("\n".join(chosen))
        return 0
    lines = []
    for command in chosen:
        print(f"\n# {command}", flush=True)
        words = command.split()
        start = time.monotonic()
        status = subprocess.run(
            words if words[0] == "make" else [sys.executable, _HERE, *words], cwd=_HERE.parent
        ).returncode
        lines.append(
            (status, f"{'failed' if status else 'passed'}  {command}, {(time.monotonic() - start) / 60:.1f} minutes")
        )
    print("\n" + "\n".join(line for _, line in lines))
    return int(any(status for status, _ in lines))
