"""Resident memory of the outer state, by mode and codec, against the formula of docs/diloco_memory.md."""

from __future__ import annotations

import dataclasses
from typing import Any

from linklab import Lab
from linklab.job import run_on_hosts

import torch_lowcomm as lc
from diloco.cases import Case

SHAPES = [[1024, 3072]] * 16  # 50.3 M parameters
_FLOAT = 4

CASES = [
    Case("continue int4"),
    Case("continue gauss2", codec="gauss2"),
    Case("continue fp32", codec=None),
    Case("continue rank 64, int4", rank=64),
    Case("continue int4, residuals int8", residual="int8"),
    Case("restart int4", mode="restart"),
    Case("sync int4", mode="sync"),
    Case("sync fp32", mode="sync", codec=None),
]


@dataclasses.dataclass(frozen=True)
class Row:
    """Bytes a parameter on rank 0, of fp32 parameters: `resident` after two outer steps less before the loop was made,
    `peak` the most since, `formula` what the former must be.
    """

    name: str
    resident: float
    peak: float
    formula: float


def formula(case: Case) -> float:
    """Bytes a parameter by docs/diloco_memory.md, with a message under way but in mode sync."""
    waits = case.mode == "sync"
    copies = 2 + (not waits)
    if case.codec is None:
        return _FLOAT * (copies + 1)
    rows, columns = SHAPES[0]
    sent = lc.codec(case.codec).encoded_bytes(rows * columns) / (rows * columns)
    if case.rank:
        sent = _FLOAT * case.rank * (rows + columns) / (rows * columns)
    kept = _FLOAT * copies + (0 if waits else sent)
    if case.codec.startswith("gauss"):
        return kept
    return kept + 2 * (_FLOAT if case.residual == "float32" else 1 + _FLOAT / 512)


def measure() -> list[Row]:
    """A row a case, each in processes of its own. LabError when a rank fails."""
    rows = []
    for case in CASES:
        with Lab(hosts=2) as lab:
            job: dict[str, Any] = {"case": dataclasses.asdict(case), "shapes": SHAPES}
            found = run_on_hosts(lab, "diloco.memory_rank", job)[0]
        rows.append(Row(case.name, found["resident"], found["peak"], formula(case)))
    return rows
