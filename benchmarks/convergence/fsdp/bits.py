"""QSDP's Tables 1 and 2: perplexity by bits of weights and of gradients, and 8 bits without buckets, over paired seeds.

Every pair is `minmax<b>` weights and `qsgd<b>` gradients with buckets of 1024. "Naive W8G8" has one scale for all of a layer's
flat buffer, norms in it: the paper leaves it out as a baseline because it loses over 2 units of perplexity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from report import Gate
from tables import Table, to_json

from convergence import paired
from convergence.fsdp import runs as fsdp_runs
from convergence.fsdp.rank import Configuration
from convergence.fsdp.variants import FEW

STEPS = 200
WEIGHTS, GRADIENTS = (8, 6, 5, 4, 3), (32, 8, 4)
NAIVE = "naive W8G8"
# GPT-125M on C4, even levels, as the paper's Table 3 repeats them; its Tables 1 and 2 are pictures in the text we have.
PAPERS_BASELINE = 35.81
PAPER = {(6, 4): 35.81, (5, 4): 36.34, (4, 4): 37.61, (4, 32): 37.11}


def measure(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """Runs every pair of bits; a row a run, then the tables.

    Args:
        quick: W4G4 and 8 bits alone, for a few steps, and a loose bound.
        seeds: Number of paired seeds.

    Returns:
        `tables`, `configurations` and `curves` for the JSON, and the gates.
    """
    weights, gradients = ((4,), (4,)) if quick else (WEIGHTS, GRADIENTS)
    size = FEW if quick else {"steps": STEPS}
    fsdp_runs.print_heading()
    runs = fsdp_runs.run_all(presets(size, weights, gradients), seeds)
    tables = [table_of(runs, weights, gradients), buckets_table(runs)]
    print("\n".join(table.text() for table in tables))
    found = paired.ratio(runs[NAIVE], runs["W8G8"])
    print(f"# perplexity ratio {NAIVE} / W8G8: {found.said()}")
    if quick:
        gate = Gate("perplexity ratio W8G8 / exact, loose", paired.ratio(runs["W8G8"], runs["exact"]).mean, "<=", 1.1)
    else:
        gate = Gate(f"perplexity ratio {NAIVE} / W8G8, bound 1 + a standard error", found.mean, ">", 1 + found.error)
    return {"tables": to_json(tables), **fsdp_runs.kept(runs)}, [gate]


def presets(size: dict[str, int], weights: Sequence[int], gradients: Sequence[int]) -> dict[str, Configuration]:
    """The exact run, all pairs of bits, and 8 bits with and without buckets; `size`: steps, and how much is validated."""
    pairs = {f"W{w}G{g}": (w, g) for w in weights for g in gradients} | {"W8G8": (8, 8)}
    coded = {
        name: Configuration(
            weights=f"minmax{w}:bucket=1024", gradients="none" if g == 32 else f"qsgd{g}:bucket=1024", **size
        )
        for name, (w, g) in pairs.items()
    }
    naive = "all_gather=minmax8:bucket=tensor; reduce_scatter=qsgd8:bucket=tensor"
    return {"exact": Configuration(**size), **coded, NAIVE: Configuration(policy=naive, **size)}


def table_of(runs: dict[str, list[dict[str, Any]]], weights: Sequence[int], gradients: Sequence[int]) -> Table:
    """Ratios to the exact run: a row a number of bits of weights, a column one of gradients, and the paper's."""
    exact = runs["exact"]
    rows = []
    for w in weights:
        ours = [paired.ratio(runs[f"W{w}G{g}"], exact).cell() for g in gradients]
        theirs = [f"{PAPER[w, g]} ({PAPER[w, g] / PAPERS_BASELINE:.4f})" if (w, g) in PAPER else "" for g in (32, 4)]
        rows.append([f"W{w}", *ours, *theirs])
    columns = ["perplexity / exact", *(f"G{g}" for g in gradients), "paper: G32 (/ baseline)", "paper: G4 (/ baseline)"]
    return Table("perplexity by bits of weights and gradients, by the exact run's (the paper's Table 2)", columns, rows)


def buckets_table(runs: dict[str, list[dict[str, Any]]]) -> Table:
    """8 bits with buckets and without; and what a rank sends of each."""
    exact = runs["exact"]
    rows = []
    for name in ("exact", "W8G8", NAIVE):
        of_name = runs[name]
        last = fsdp_runs.curve(of_name[0])
        ratio = "" if name == "exact" else paired.ratio(of_name, exact).cell()
        rows.append([name, f"{paired.perplexity(of_name):.3f}", ratio, f"{last['bytes'][-1] / 1e6:.1f}"])
    columns = ["run", "perplexity", "/ exact", "MB a rank sent"]
    return Table("8 bits with buckets of 1024, and with one scale a flat buffer", columns, rows)
