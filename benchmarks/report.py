"""The report of every benchmark: the machine and the commit it ran on, its gates, and its JSON.

python benchmarks/report.py FILE...     # puts versions and commit into the JSON that a C++ program wrote
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import operator
import subprocess
import sys
from pathlib import Path
from typing import Any

import result_pages

from torch_lowcomm.cli import machine as here
from torch_lowcomm.cli.machine import machine, versions

__all__ = ["Gate", "arguments", "finish", "heading", "write_json"]

_ROOT = Path(__file__).parents[1]

_OPERATORS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq}

_ROW = 1500  # characters: a value that fits is a line, as a row of a table or a curve should be


@dataclasses.dataclass(frozen=True)
class Gate:
    """A claim with a number: it passes when `value op bound`."""

    name: str
    value: float
    op: str
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the claim holds (never for NaN)."""
        return bool(_OPERATORS[self.op](self.value, self.bound))

    def to_json(self) -> dict[str, Any]:
        """The form that the JSON file holds."""
        return {**dataclasses.asdict(self), "pass": self.passed}

    def line(self) -> str:
        """One fixed-width row."""
        verdict = "PASS" if self.passed else "FAIL"
        return f"{verdict}  {self.name:<72} {self.value:>10.4f} {self.op:>2} {self.bound:.4f}"


def positive(text: str) -> int:
    """The type of an option that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return int(text)


def arguments(doc: str | None, *, quick: str = "", repetitions: int = 0, seeds: int = 0) -> argparse.ArgumentParser:
    """A parser with the options that programs have in common, and --json. `quick` says what --quick does; a program without it,
    or without a default of repetitions or seeds, has no such option.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    if repetitions:
        parser.add_argument("--repetitions", type=positive, default=repetitions, help=f"of every case ({repetitions})")
    if seeds:
        parser.add_argument("--seeds", type=positive, default=seeds, help=f"paired ones ({seeds})")
    parser.add_argument("--json", type=Path, help="versions, machine, rows, gates")
    return parser


def heading(name: str, **options: object) -> str:
    """The lines that a program prints first; what it prints from here on is its page's block (`finish`)."""
    result_pages.Transcript.begin()
    return here.heading(name, **options)


def finish(gates: list[Gate], path: Path | None, content: dict[str, Any]) -> int:
    """Prints the gates; where a path is given writes the JSON, and what was printed into the page that shows it. Returns the exit
    status, 1 when a gate fails.
    """
    for gate in gates:
        print(gate.line())
    if path:
        write_json(path, content, gates)
        if path.parent.resolve() == result_pages.RESULTS and isinstance(sys.stdout, result_pages.Transcript):
            result_pages.update(path.stem, sys.stdout.text)
    return 0 if all(gate.passed for gate in gates) else 1


def commit() -> str:
    """The commit of this folder, with "+" behind it where its files are others; "none" outside of a repository."""
    git = ["git", "-C", str(_ROOT)]
    try:
        found = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "none"
    return found.stdout.strip() + ("+" if changed.stdout else "")


def stamp(path: Path) -> None:
    """Puts versions and commit at the beginning of a JSON object.

    A JSON that has versions keeps them: it is the result of an earlier run.
    """
    content = json.loads(path.read_text())
    path.write_text(laid_out({"versions": {**versions(), "commit": commit()}} | content) + "\n")


def laid_out(value: Any, indent: str = "") -> str:
    """JSON with a line for each value of up to _ROW characters, and for each list of numbers; longer ones are broken."""
    flat = json.dumps(value)
    numbers = isinstance(value, list) and not any(isinstance(item, dict | list | str) for item in value)
    if not isinstance(value, dict | list) or numbers or len(indent) + len(flat) <= _ROW:
        return flat
    inner = indent + " "
    if isinstance(value, dict):
        parts = [f"{inner}{json.dumps(key)}: {laid_out(item, inner)}" for key, item in value.items()]
    else:
        parts = [inner + laid_out(item, inner) for item in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return "\n".join([opening, ",\n".join(parts), indent + closing])


def write_json(path: Path, content: dict[str, Any], gates: list[Gate]) -> None:
    """Writes versions, commit, machine, content and gates."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {
        "versions": {**versions(), "commit": commit()},
        "machine": machine(),
        **content,
        "gates": [gate.to_json() for gate in gates],
    }
    path.write_text(laid_out(whole) + "\n")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        stamp(Path(name))
