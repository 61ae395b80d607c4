"""QSDP's Table 3: perplexity with levels that are learned and with even ones, over paired seeds.

Both runs of a pair round to the nearest level of a `levels<b>` codec, weights and gradients, and differ in where the levels
are. They are learned at the paper's shares of a run. The model is one whose matrices learn: those of over 100,000 elements.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from report import Gate
from tables import Table, to_json

from convergence import paired
from convergence.fsdp import runs as fsdp_runs
from convergence.fsdp.rank import Configuration
from convergence.fsdp.variants import FEW
from torch_lowcomm.fsdp.levels import PAPERS_STEPS

PAPERS_RUN = 4800  # steps, of GPT-125M on C4
STEPS = 200
MODEL = {"width": 256, "layers": 2}
PAIRS = {"W6G4": (6, 4), "W5G4": (5, 4), "W4G4": (4, 4), "W4G32": (4, 32), "W3G3": (3, 3)}
PAPERS_BASELINE = 35.81
PAPER = {
    "W6G4": (35.81, 35.75),
    "W5G4": (36.34, 36.01),
    "W4G4": (37.61, 36.94),
    "W4G32": (37.11, 36.55),
}  # even, learned
GATED = ("W4G4", "W4G32")


def learned_at(steps: int) -> tuple[int, ...]:
    """The paper's steps at which levels are learned, as shares of a run of so many."""
    return tuple(round(at * steps / PAPERS_RUN) for at in PAPERS_STEPS)


def levels(bits: int) -> str:
    """The codec."""
    return "none" if bits == 32 else f"levels{bits}:bucket=1024"


def presets(size: dict[str, int], pairs: tuple[str, ...]) -> dict[str, Configuration]:
    """The exact run, and each pair of bits with even and with learned levels; `size`: steps, and how much is validated."""
    common = {**size, **MODEL}
    found = {"exact": Configuration(**common)}
    for name in pairs:
        weights, gradients = map(levels, PAIRS[name])
        even = Configuration(weights=weights, gradients=gradients, learn_at=(), **common)
        found[f"{name} even"] = even
        found[f"{name} learned"] = dataclasses.replace(even, learn_at=learned_at(size["steps"]))
    return found


def measure(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """Runs every pair of bits; a row a run, then the table.

    Args:
        quick: W4G4 alone, for a few steps, and a loose bound.
        seeds: Number of paired seeds.

    Returns:
        `tables`, `configurations` and `curves` for the JSON, and the gates.
    """
    pairs = ("W4G4",) if quick else tuple(PAIRS)
    fsdp_runs.print_heading()
    runs = fsdp_runs.run_all(presets(FEW if quick else {"steps": STEPS}, pairs), seeds)
    table = table_of(runs, pairs)
    print(table.text())
    gates = []
    for name in (name for name in pairs if name in GATED):
        found = paired.ratio(runs[f"{name} learned"], runs[f"{name} even"])
        print(f"# perplexity ratio {name} learned / even: {found.said()}")
        if quick:
            gates.append(Gate(f"perplexity ratio {name} learned / even, loose", found.mean, "<=", 1.1))
        else:
            title = f"perplexity ratio {name} learned / even levels, bound 1 + a standard error"
            gates.append(Gate(title, found.mean, "<=", 1 + found.error))
    return {"tables": to_json([table]), **fsdp_runs.kept(runs)}, gates


def table_of(runs: dict[str, list[dict[str, Any]]], pairs: tuple[str, ...]) -> Table:
    """A row a pair of bits: ours, then the paper's; each next to the exact run's."""
    exact = runs["exact"]
    rows = [["exact", f"{paired.perplexity(exact):.3f}", "", "", "", "", f"{PAPERS_BASELINE}", "", ""]]
    for name in pairs:
        even, learned = runs[f"{name} even"], runs[f"{name} learned"]
        row = [name, f"{paired.perplexity(even):.3f}", paired.ratio(even, exact).cell()]
        row += [f"{paired.perplexity(learned):.3f}", paired.ratio(learned, exact).cell()]
        row.append(paired.ratio(learned, even).cell())
        if name in PAPER:
            theirs = PAPER[name]
            row += [f"{of_way} ({of_way / PAPERS_BASELINE:.4f})" for of_way in theirs]
            row.append(f"{theirs[1] / theirs[0]:.4f}")
        else:
            row += ["", "", ""]
        rows.append(row)
    columns = ["bits", "even levels", "/ exact", "learned", "/ exact", "learned / even"]
    columns += ["paper: even (/ baseline)", "paper: learned (/ baseline)", "paper: learned / even"]
    return Table("perplexity with even and with learned levels (the paper's Table 3)", columns, rows)
