"""DiLoCoX's experiments (arXiv 2506.21263, section 4) at our scale: its settings to the letter, next to the figures it gives.

Sections 4.1.3 and 4.2.1 give two comparisons, of which Table 1 is the second's ablation: OPT-1.3B with everybody at 500
times fewer bytes, and a 107B model at 1,000 times. 4,000 inner steps. A rank of 2,048, a quarter of that model's width, is
a quarter of ours. Settings that the text leaves open are those of presets.py: outer optimizer, inner AdamW, the least H.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from report import Gate

from convergence.diloco import gates as diloco_gates
from convergence.diloco import presets as diloco_presets
from convergence.diloco import runs as diloco_runs
from convergence.diloco.rank import SHAPE, Configuration
from torch_lowcomm.diloco import presets

STEPS, POINT = 4000, 20
# 4.1.3: 125 inner steps, 4 bits, one step of delay; no adaptive compression for OPT-1.3B (4.2.1). Of 32 outer steps the
# first 3 wait: DiLoCoX's paper gives no number; a tenth of all is our choice.
SMALL: dict[str, Any] = presets.diloco_x()
LARGE: dict[str, Any] = presets.diloco_x(rank=SHAPE.width // 4)


@dataclasses.dataclass(frozen=True)
class Row:
    """A run, and of its like in the paper the loss, tokens a second over 1 Gbit/s, and how many times fewer bytes it says."""

    configuration: Configuration
    loss: float
    tokens_s: float | None
    ratio: float
    of: str  # the paper's model


ROWS = {
    "AllReduce": Row(Configuration(), 4.06, 745, 1, "1.3B"),
    "OpenDiLoCo": Row(diloco_presets.open_diloco(8, STEPS), 5.37, None, 500, "1.3B"),
    "CocktailSGD, 0.1 x 0.08": Row(diloco_presets.cocktail(0.08), 5.79, 16161, 500, "1.3B"),
    "DiLoCoX, int4": Row(Configuration(outer=SMALL), 4.27, 23880, 500, "1.3B"),
    "CocktailSGD, 0.1 x 0.04": Row(diloco_presets.cocktail(0.04), 5.23, 2427, 1000, "107B"),
    "Full DiLoCoX": Row(Configuration(outer=LARGE), 4.20, 3728, 1000, "107B"),
    "w/o Overlap": Row(Configuration(outer=LARGE | {"mode": "sync", "sync_warmup": 0}), 4.15, 2197, 1000, "107B"),
    "w/o Compression": Row(
        Configuration(outer={**SMALL, "codec": None, "error_feedback": False}), 4.02, 1168, 125, "107B"
    ),
}
LARGE_ALL_REDUCE = 3.90, 10.4  # the 107B model's loss and tokens a second by AllReduce, which is one run here
# A named claim of the paper: (the run that is under the other).
CLAIMS = (
    ("DiLoCoX, int4", "OpenDiLoCo"),
    ("DiLoCoX, int4", "CocktailSGD, 0.1 x 0.08"),
    ("Full DiLoCoX", "CocktailSGD, 0.1 x 0.04"),
)


def measure(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[Gate]]:
    """Runs every row; prints it, and then all of them next to the paper's.

    Args:
        quick: 80 steps and intervals of at most 10, and bounds of arithmetic alone.
        seeds: Of every run.

    Returns:
        `configurations`, `curves` and `paper` for the JSON, and the gates.
    """
    diloco_runs.print_heading()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ROWS}
    for seed in range(seeds):
        for name, row in ROWS.items():
            run = dataclasses.replace(row.configuration, seed=seed, steps=STEPS)
            runs[name].append(diloco_runs.run(name, diloco_runs.shortened(run) if quick else run))
    print_table(runs)
    gates = [diloco_gates.formula_gate(runs)]
    if not quick:
        gates = [*(diloco_gates.loss_gate(runs, *claim, 1.0) for claim in CLAIMS), *gates]
    every = diloco_runs.POINT if quick else POINT
    return {
        "parameters": diloco_runs.ELEMENTS,
        "configurations": {name: dataclasses.asdict(of_name[0]["configuration"]) for name, of_name in runs.items()},
        "paper": {name: {k: v for k, v in vars(row).items() if k != "configuration"} for name, row in ROWS.items()},
        "curves": [diloco_runs.curve(entry, every=every) for of_name in runs.values() for entry in of_name],
    }, gates


def print_table(runs: dict[str, list[dict[str, Any]]]) -> None:
    """Losses, means over seeds, by that of AllReduce, as the paper's are; and how many times fewer bytes."""
    means = {name: sum(entry["validation"] for entry in of_name) / len(of_name) for name, of_name in runs.items()}
    print("#                                ---------- here ----------   --------------- the paper ---------------")
    print(
        f"# {'run':<24}{'':>6}{'loss':>8}{'/ AllR.':>9}{'ratio':>9}{'loss':>11}{'/ AllR.':>9}{'ratio':>8}{'tok/s':>9}"
    )
    for name, row in ROWS.items():
        base = ROWS["AllReduce"].loss if row.of == "1.3B" else LARGE_ALL_REDUCE[0]
        tokens = f"{row.tokens_s:>9.0f}" if row.tokens_s else f"{'-':>9}"
        print(
            f"# {name:<24}{row.of:>6}{means[name]:>8.4f}{means[name] / means['AllReduce']:>9.3f}"
            f"{runs[name][0]['ratio']:>9.1f}{row.loss:>11.2f}{row.loss / base:>9.3f}{row.ratio:>8.0f}{tokens}"
        )
    loss, tokens_s = LARGE_ALL_REDUCE
    print(f"# {'AllReduce':<24}{'107B':>6}{'':>26}{loss:>11.2f}{1:>9.3f}{1:>8}{tokens_s:>9.1f}")
