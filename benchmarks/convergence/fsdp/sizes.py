"""QSDP's Table 1: perplexity with 8-bit weights and gradients by size of the model, over paired seeds.

The paper's models have 125 M, 350 M and 1.3 B parameters; ours are a byte GPT's. The bound is that of `convergence fsdp`.
"""

from __future__ import annotations

from typing import Any

from report import Gate
from tables import Table, to_json

from convergence import paired
from convergence.fsdp import runs as fsdp_runs
from convergence.fsdp.rank import Configuration
from convergence.fsdp.variants import FEW

STEPS = 200
SIZES = {"1.6 M": {"width": 256, "layers": 2}, "10.7 M": {"width": 384, "layers": 6, "heads": 6}}
BOUND = 1.01


def measure(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """Runs both ways at every size; a row a run, then the table.

    Args:
        quick: The smaller size for a few steps, and a loose bound.
        seeds: Number of paired seeds.

    Returns:
        `tables`, `configurations` and `curves` for the JSON, and the gates.
    """
    size = FEW if quick else {"steps": STEPS}
    fsdp_runs.print_heading()
    runs = fsdp_runs.run_all(
        {
            f"{way}, {name}": Configuration(weights=weights, gradients=gradients, **size, **shape)
            for name, shape in list(SIZES.items())[: 1 if quick else None]
            for way, weights, gradients in (
                ("exact", "none", "none"),
                ("W8G8", "minmax8:bucket=1024", "qsgd8:bucket=1024"),
            )
        },
        seeds,
    )
    rows, gates = [], []
    for name in (name for name in SIZES if f"exact, {name}" in runs):
        exact, coded = runs[f"exact, {name}"], runs[f"W8G8, {name}"]
        found = paired.ratio(coded, exact)
        sent = [fsdp_runs.curve(of_way[0])["bytes"][-1] / 1e6 for of_way in (exact, coded)]
        perplexities = [f"{paired.perplexity(of_way):.4f}" for of_way in (exact, coded)]
        rows.append([name, *perplexities, found.cell(), *(f"{mb:.0f}" for mb in sent)])
        bound = 1.1 if quick else BOUND + found.error
        gates.append(
            Gate(f"perplexity ratio W8G8 / exact, {name}, bound {BOUND} + a standard error", found.mean, "<=", bound)
        )
    columns = ["parameters", "exact", "W8G8", "W8G8 / exact", "MB a rank sent, exact", "W8G8"]
    table = Table("perplexity with 8 bits by size (the paper's Table 1)", columns, rows)
    print(table.text())
    return {"tables": to_json([table]), **fsdp_runs.kept(runs)}, gates
