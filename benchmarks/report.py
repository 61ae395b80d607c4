"""What every benchmark reports: the machine it ran on, its gates, and its JSON."""

from __future__ import annotations

import dataclasses
import json
import operator
import re
from pathlib import Path
from typing import Any

from torch_lowcomm.cli.machine import heading, machine, versions

__all__ = ["Gate", "finish", "heading", "write_json"]

_OPERATORS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq}

_INNERMOST = re.compile(r"\[[^\[\]{}\"]*\]")  # lists of numbers


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


def finish(gates: list[Gate], path: Path | None, content: dict[str, Any]) -> int:
    """Prints the gates, writes the JSON where a path is given; the exit status, 1 when a gate fails."""
    for gate in gates:
        print(gate.line())
    if path:
        write_json(path, content, gates)
    return 0 if all(gate.passed for gate in gates) else 1


def write_json(path: Path, content: dict[str, Any], gates: list[Gate]) -> None:
    """Writes versions, machine, content and gates."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"versions": versions(), "machine": machine(), **content, "gates": [gate.to_json() for gate in gates]}
    # A curve is a line: a number a line made files of a hundred thousand.
    text = _INNERMOST.sub(lambda found: " ".join(found[0].split()), json.dumps(whole, indent=1))
    path.write_text(text + "\n")
