"""Weights of lc.SeedReplay in 8 or 4 bits (`base=`) next to the same in float32: loss, seconds a step, memory a parameter.

    python benchmarks seed_replay_base [--quick] [--seeds 3] [--only loss|seconds|memory] [--json FILE]

Loss: a byte-level GPT that back-propagation has trained on the sources of Python's library is tuned by forward passes alone
on its English documentation (pydoc_data), every run from the same weights on the same batches along the same directions.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from pathlib import Path
from typing import Any

import launch
import report

from seed_replay import base_rank
from seed_replay.base_rank import Configuration

BASES: dict[str, str | None] = {"fp32": None, "int8": "int8", "nf4": "nf4"}
BYTES = {
    "fp32": 4.0,
    "int8": 1 + 4 / 64,
    "nf4": 0.5 + 4 / 64,
}  # a parameter, by the formula: codes, and a scale a block
# The validation loss by the fp32 base's; a standard error is added to the bound.
BOUNDS = {"int8": 1.01, "nf4": 1.05}


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps, no bounds on losses")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def losses(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[report.Gate]]:
    """Tunes by each base and seed; prints a row a run."""
    print(f"# {'base':<12}{'seed':>5}{'before':>9}{'after':>9}{'/ fp32':>9}{'seconds':>9}")
    rows: list[dict[str, Any]] = []
    c = Configuration(steps=15, trained=100) if quick else Configuration()
    for seed in range(seeds):
        of_seed = functools.partial(launch.run, base_rank.tune, ranks=1, deadline_s=3600, seed=seed, configuration=c)
        exact = None
        for name, base in BASES.items():
            (entry,) = of_seed(base=base)
            exact = exact or entry["after"]
            rows.append({"base": name, "seed": seed, "ratio": entry["after"] / exact, **entry})
            print(
                f"  {name:<12}{seed:>5}{entry['before']:>9.4f}{entry['after']:>9.4f}{rows[-1]['ratio']:>9.4f}"
                f"{entry['seconds']:>9.1f}",
                flush=True,
            )
    learned = max(row["after"] / row["before"] for row in rows if row["base"] == "fp32")
    found = [report.Gate("fp32: validation loss after / before, largest", learned, "<", 1.0 if quick else 0.97)]
    for name, bound in BOUNDS.items():
        ratios = [row["ratio"] for row in rows if row["base"] == name]
        mean = statistics.mean(ratios)
        error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
        print(f"# loss {name} / fp32: mean {mean:.4f}, standard error {error:.4f}")
        if not quick:
            found.append(report.Gate(f"loss {name} / fp32, bound {bound} + a standard error", mean, "<", bound + error))
    return {"loss": rows}, found


def seconds(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[report.Gate]]:
    """Steps in turn, with pools of several sizes; prints a row each."""
    (rows,) = launch.run(base_rank.step_seconds, ranks=1, deadline_s=3600, repetitions=3 if quick else 9)
    print(f"# {'base':<12}{'pool':>6}{'step s':>9}{'/ fp32':>9}{'least':>9}{'most':>9}")
    for row in rows:
        print(
            f"  {row['base']:<12}{row['pool']:>6}{row['step_s']:>9.4f}{row['ratio']:>9.3f}{row['least']:>9.3f}"
            f"{row['most']:>9.3f}"
        )
    return {"seconds": rows}, []


def memory(*, quick: bool, seeds: int) -> tuple[dict[str, Any], list[report.Gate]]:
    """Resident bytes a parameter, each base in a process of its own; prints a row each."""
    print(f"# {'base':<12}{'resident':>10}{'formula':>10}{'step peak':>11}   (bytes a parameter)")
    rows = []
    for name, base in BASES.items():
        (entry,) = launch.run(base_rank.resident, ranks=1, deadline_s=600, base=base)
        rows.append({"base": name, "formula": BYTES[name], **entry})
        print(f"  {name:<12}{entry['resident']:>10.3f}{BYTES[name]:>10.4f}{entry['peak']:>11.3f}", flush=True)
    return {"memory": rows}, [
        report.Gate(
            f"{row['base']}: resident bytes a parameter / by the formula", row["resident"] / row["formula"], "<", 1.1
        )
        for row in rows
    ]


PARTS = {"loss": losses, "seconds": seconds, "memory": memory}


def main() -> int:
    """Measures and reports."""
    args = parse()
    print(report.heading("seed_replay_base", quick=args.quick, seeds=args.seeds))
    content: dict[str, Any] = {}
    gates: list[report.Gate] = []
    start = time.monotonic()
    for name, part in PARTS.items():
        if args.only in (None, name):
            rows, held = part(quick=args.quick, seeds=args.seeds)
            content |= rows
            gates += held
    print(f"# {time.monotonic() - start:.0f} seconds in all")
    return report.finish(gates, args.json, content)
