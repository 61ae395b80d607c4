"""What every benchmark reports: the machine it ran on, its gates, and its JSON."""

from __future__ import annotations

import dataclasses
import json
import operator
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_OPERATORS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq}


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


def versions() -> dict[str, str]:
    """Of Python, torch and torch_lowcomm."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_lowcomm": metadata.version("torch_lowcomm"),
    }


def machine() -> dict[str, Any]:
    """The processor, its cores that this process may use, memory and system."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def heading(name: str, **options: object) -> str:
    """The `#` lines above a benchmark's rows: versions, machine and options."""
    about = {**versions(), **machine()}
    return "\n".join(
        (
            f"# {name}",
            "# " + "  ".join(f"{key}={value}" for key, value in about.items()),
            "# " + "  ".join(f"{key}={value}" for key, value in options.items()),
        )
    )


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
    path.write_text(json.dumps(whole, indent=1) + "\n")
