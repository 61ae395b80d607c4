"""QSDP's Tables 1 and 2: perplexity by bits of weights and of gradients, and 8 bits without buckets, over paired seeds.

Every pair is `minmax<b>` weights and `qsgd<b>` gradients with buckets of 1024. "Naive W8G8" has one scale for all of a layer's
flat buffer, norms in it: the paper leaves it out as a baseline because it loses over 2 units of perplexity.
"""

from __future__ import annotations

from typing import Any

import paired
import qsdp
from fsdp_rank import Configuration
from report import Gate
from tables import Table, to_json

STEPS, QUICK_STEPS = 200, 6
WEIGHTS, GRADIENTS = (8, 6, 5, 4, 3), (32, 8, 4)
NAIVE = "naive W8G8"
# GPT-125M on C4, even levels, as the paper's Table 3 repeats them; its Tables 1 and 2 are pictures in the text we have.
PAPERS_BASELINE = 35.81
PAPER = {(6, 4): 35.81, (5, 4): 36.34, (4, 4): 37.61, (4, 32): 37.11}


def preset(weights: int, gradients: int, steps: int) -> Configuration:
    """A pair of bits; 32 are exact."""
    return Configuration(
        weights="none" if weights == 32 else f"minmax{weights}:bucket=1024",
        gradients="none" if gradients == 32 else f"qsgd{gradients}:bucket=1024",
        steps=steps,
    )


def measure(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """Runs every pair of bits; a row a run, then the tables.

    Args:
        quick: W8G8 alone, for a few steps, and a loose bound.
        seeds: Number of paired seeds.

    Returns:
        `tables`, `configurations` and `curves` for the JSON, and the gates.
    """
    steps = QUICK_STEPS if quick else STEPS
    pairs = [(8, 8)] if quick else [(w, g) for w in WEIGHTS for g in GRADIENTS]
    chosen = {"exact": preset(32, 32, steps)} | {f"W{w}G{g}": preset(w, g, steps) for w, g in pairs}
    if not quick:
        naive = "all_gather=minmax8:bucket=tensor; reduce_scatter=qsgd8:bucket=tensor"
        chosen[NAIVE] = Configuration(policy=naive, steps=steps)
    qsdp.print_heading()
    runs = qsdp.run_all(chosen, seeds)
    w8g8 = paired.ratio(runs["W8G8"], runs["exact"])
    if quick:
        gates = [Gate("perplexity ratio W8G8 / exact, few steps, loose", w8g8.mean, "<=", 1.1)]
        return {"tables": [], **qsdp.kept(runs)}, gates
    tables = [table_of(runs), buckets_table(runs)]
    print("\n".join(table.text() for table in tables))
    naive_ratio = paired.ratio(runs[NAIVE], runs["W8G8"])
    print(f"# perplexity ratio {NAIVE} / W8G8: {naive_ratio.said()}")
    gates = [
        Gate(
            f"perplexity ratio {NAIVE} / W8G8, bound 1 + a standard error", naive_ratio.mean, ">", 1 + naive_ratio.error
        )
    ]
    return {"tables": to_json(tables), **qsdp.kept(runs)}, gates


def table_of(runs: dict[str, list[dict[str, Any]]]) -> Table:
    """Ratios to the exact run: a row a number of bits of weights, a column one of gradients, and the paper's."""
    exact = runs["exact"]
    rows = []
    for w in WEIGHTS:
        ours = [paired.ratio(runs[f"W{w}G{g}"], exact).cell() for g in GRADIENTS]
        theirs = [f"{PAPER[w, g]} ({PAPER[w, g] / PAPERS_BASELINE:.4f})" if (w, g) in PAPER else "" for g in (32, 4)]
        rows.append([f"W{w}", *ours, *theirs])
    columns = ["perplexity / exact", *(f"G{g}" for g in GRADIENTS), "paper: G32 (/ baseline)", "paper: G4 (/ baseline)"]
    return Table("perplexity by bits of weights and gradients, by the exact run's (the paper's Table 2)", columns, rows)


def buckets_table(runs: dict[str, list[dict[str, Any]]]) -> Table:
    """8 bits with buckets and without; and what a rank sends of each."""
    exact = runs["exact"]
    rows = []
    for name in ("exact", "W8G8", NAIVE):
        of_name = runs[name]
        last = qsdp.curve(of_name[0])
        ratio = "" if name == "exact" else paired.ratio(of_name, exact).cell()
        rows.append([name, f"{paired.perplexity(of_name):.3f}", ratio, f"{last['bytes'][-1] / 1e6:.1f}"])
    columns = ["run", "perplexity", "/ exact", "MB a rank sent"]
    return Table("8 bits with buckets of 1024, and with one scale a flat buffer", columns, rows)
