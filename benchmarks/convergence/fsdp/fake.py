"""QSDP's Figure 6 (Appendix B): seconds a step were only the first 1/γ of each message sent, by γ and by the link's rate.

And its Table 5 by bits in place of γ, for coding costs little: seconds a step by bits of weights and of gradients.

Two hosts of `linklab`, as root, the steps of all cases in turn as `benchmarks/steps` times them, and next to them the steps of
QSDP itself: what coding costs is what W8G8 takes beyond γ = 4. A measurement of time: it counts on a quiet machine alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from linklab import LabUnavailable
from report import Gate
from steps.cases import Case
from steps.measure import Row
from steps.measure import measure as measure_steps
from tables import Table, to_json

RATES = ("10mbit", "100mbit", "1gbit")
RATIOS = (2, 4, 8, 16, 32)
CASES = [
    Case("exact", weights="none", gradients="none", base=True),
    *(Case(f"γ = {ratio}", weights="none", gradients="none", fake=ratio) for ratio in RATIOS),
    Case("W8G8", weights="minmax8:bucket=1024", gradients="qsgd8:bucket=1024"),
    Case("W4G4", weights="minmax4:bucket=1024", gradients="qsgd4:bucket=1024"),
]
BITS = (32, 8, 4)
GRID = [
    Case(
        f"W{w}G{g}",
        weights="none" if w == 32 else f"minmax{w}:bucket=1024",
        gradients="none" if g == 32 else f"qsgd{g}:bucket=1024",
        base=w == g == 32,
    )
    for w in BITS
    for g in BITS
]


def measure(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """Times every case at every rate; one sentence and nothing else where there is no lab.

    Args:
        quick: The base model at one rate, a step a case.
        seeds: Is not used: times have none.

    Returns:
        `tables` and `links` (the rows of a rate) for the JSON; there is no gate.
    """
    model, rates, repetitions = ("base", RATES[1:2], 1) if quick else ("10M", RATES, 9)
    links: list[dict[str, Any]] = []
    tables = []
    try:
        for rate in rates:
            alone, rows = measure_steps("fsdp", CASES, rate=rate, model=model, batch=8, repetitions=repetitions)
            tables.append(table_of(rate, alone, rows))
            print(tables[-1].text(), flush=True)
            links.append(
                {"rate": rate, "model": model, "comp_s": alone, "rows": [dataclasses.asdict(row) for row in rows]}
            )
    except LabUnavailable as error:
        print(f"# no part fake: {error}")
    return {"tables": to_json(tables), "links": links}, []


def measure_grid(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """Times every pair of bits of weights and of gradients at one rate; one sentence and nothing else where there is no lab.

    Args:
        quick: The base model, a step a case.
        seeds: Is not used.

    Returns:
        `tables` and `links` for the JSON; there is no gate.
    """
    model, rate, repetitions = ("base", "100mbit", 1) if quick else ("10M", "100mbit", 9)
    try:
        alone, rows = measure_steps("fsdp", GRID, rate=rate, model=model, batch=8, repetitions=repetitions)
    except LabUnavailable as error:
        print(f"# no part grid: {error}")
        return {"tables": [], "links": []}, []
    seconds = {row.name: row.seconds for row in rows}
    cells = [[f"W{w}", *(f"{seconds[f'W{w}G{g}']:.3f}" for g in BITS)] for w in BITS]
    title = f"seconds a step at {rate} by bits of weights and of gradients (the paper's Table 5, at 100 Gbit/s)"
    table = Table(title, [f"no communication: {alone:.3f}", *(f"G{g}" for g in BITS)], cells)
    print(table.text(), flush=True)
    link = {"rate": rate, "model": model, "comp_s": alone, "rows": [dataclasses.asdict(row) for row in rows]}
    return {"tables": to_json([table]), "links": [link]}, []


def table_of(rate: str, alone: float, rows: list[Row]) -> Table:
    """A row a case, and what a step computes."""
    cells = [["no communication", f"{alone:.3f}", f"{rows[0].seconds / alone:.2f}", "", ""]]
    for row in rows:
        faster = rows[0].seconds / row.seconds
        cells.append([row.name, f"{row.seconds:.3f}", f"{faster:.2f}", f"{row.bound:.2f}", f"{row.sent / 1e6:.3f}"])
    columns = ["sent", "seconds a step", "times as fast as exact", "bound", "MB a step"]
    return Table(f"a step at {rate} (the paper's Figure 6)", columns, cells)
