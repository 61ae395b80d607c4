"""Tokens a second of the rows of DiLoCoX's Table 1 (arXiv 2506.21263) on slow links at our scale, next to the paper's.

    python benchmarks diloco_throughput [--repetitions 3] [--quick] [--json FILE]        # as root

The rows are those of convergence/diloco/table1.py on the same model (0.36 million parameters); 2 hosts of the lab. Beside them
stand the losses that `convergence diloco_table1` recorded; a run whose rank and interval adapt is timed with the first ones and
with those that it ended with there. An exact
all_reduce of it is to be as much slower than computing as that of the paper's models over 1 Gbit/s: 32 times with the 1.3B
model, which 10 Mbit/s come near to, and 357 times with the 107B model, 1 Mbit/s.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from pathlib import Path
from typing import Any

import report
from convergence.diloco.presets import ADAPTIVE
from convergence.diloco.rank import SHAPE, Configuration
from convergence.diloco.table1 import LARGE_ALL_REDUCE, ROWS
from linklab import Lab, LabError, LabUnavailable
from linklab.job import run_on_hosts

from diloco import table1_losses

RATES = {"1.3B": "10mbit", "107B": "1mbit"}
ALONE, EXACT = "no communication", "AllReduce"
AT_THE_END = ", last r and H"
# A claim of the paper about speed: (the run that is faster, than which).
CLAIMS = (
    ("DiLoCoX, int4", "AllReduce", "1.3B"),
    ("DiLoCoX, int4", "CocktailSGD, 0.1 x 0.08", "1.3B"),
    ("Full DiLoCoX", "AllReduce", "107B"),
    ("Full DiLoCoX", "CocktailSGD, 0.1 x 0.04", "107B"),
    ("Full DiLoCoX", "w/o Overlap", "107B"),
    ("Full DiLoCoX", "w/o Compression", "107B"),
)


@dataclasses.dataclass(frozen=True)
class Turn:
    """A row's turn: steps before the clock starts, and timed ones; `paper`: tokens a second there, if it has them.

    `of`: the row of Table 1 whose loss it has.
    """

    name: str
    configuration: Configuration
    untimed: int
    timed: int
    paper: float | None = None
    alone: bool = False
    of: str | None = None


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3, help="of every row, in turn")
    parser.add_argument("--quick", action="store_true", help="a fifth of every interval, once: that the program works")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def steady(configuration: Configuration, *, quick: bool, **options: Any) -> Configuration:
    """As a long run is once its first outer steps, which wait, are over, with its first rank and interval or those given."""
    if not configuration.outer:
        return configuration
    outer = {name: value for name, value in configuration.outer.items() if name not in (*ADAPTIVE, "sync_warmup")}
    outer |= options
    if quick:
        outer["sync_every"] //= 5
    return dataclasses.replace(configuration, outer=outer)


def turns(of: str, *, quick: bool) -> list[Turn]:
    """Of one of the paper's models, with its exact all_reduce and without communication."""
    tokens = ROWS[EXACT].tokens_s if of == "1.3B" else LARGE_ALL_REDUCE[1]
    found = [
        Turn(ALONE, Configuration(), 5, 20 if quick else 100, alone=True),
        Turn(EXACT, Configuration(), 1, 2, tokens, of=EXACT),
    ]
    losses = table1_losses.recorded()["rows"]
    for name, row in ROWS.items():
        if row.of != of or name == EXACT:
            continue
        found.append(turn(name, name, steady(row.configuration, quick=quick), row.tokens_s))
        if last := table1_losses.at_the_end(losses[name]):
            c = steady(row.configuration, quick=quick, **last)
            found.append(turn(f"{name}{AT_THE_END}", name, c, row.tokens_s))
    return found


def turn(name: str, of: str, c: Configuration, tokens_s: float | None) -> Turn:
    """A whole interval of a run that has one."""
    if not c.outer:
        return Turn(name, c, 5, 20, tokens_s, of=of)
    every = c.outer["sync_every"]
    # A message that travels while training goes on is waited for at the end of the interval after its own.
    untimed = 0 if c.outer["mode"] == "sync" else every
    return Turn(name, c, untimed, every, tokens_s, of=of)


def measure(of: str, *, repetitions: int, quick: bool) -> list[dict[str, Any]]:
    """A row a turn: tokens a second of both ranks, median over repetitions, of each of which the slower rank counts."""
    rows = turns(of, quick=quick)
    with Lab(hosts=2, rate=RATES[of]) as lab:
        job = {"rows": [dataclasses.asdict(row) for row in rows], "repetitions": repetitions}
        ranks = run_on_hosts(lab, "diloco.throughput_rank", job)
    found, losses = [], table1_losses.recorded()["rows"]
    for row, *of_ranks in zip(rows, *ranks, strict=True):
        seconds = [max(both) for both in zip(*of_ranks, strict=True)]
        tokens = 2 * row.configuration.batch * SHAPE.context * row.timed
        speeds = [tokens / each for each in seconds]
        found.append(
            {
                "of": of,
                "rate": RATES[of],
                "name": row.name,
                "steps": row.timed,
                "tokens_s": statistics.median(speeds),
                "min_machines": min(speeds),
                "most": max(speeds),
                "paper": row.paper,
                "loss_of": row.of,
            }
            | (losses[row.of] if row.of else {})
        )
    exact = next(row for row in found if row["name"] == EXACT)
    for row in found:
        row["by_exact"] = row["tokens_s"] / exact["tokens_s"]
        row["paper_by_exact"] = row["paper"] / exact["paper"] if row["paper"] else None
    return found


def print_table(rows: list[dict[str, Any]]) -> None:
    """Losses, bytes and speeds here, speeds there; speeds and losses also by those of the exact all_reduce."""
    print(f"# {rows[0]['of']} at {rows[0]['rate']}")
    print(
        f"# {'run':<26}{'loss':>8}{'/ AllR.':>9}{'ratio':>9}{'tok/s':>10}{'least':>10}{'most':>10}{'/ AllR.':>9}"
        f"   {'paper tok/s':>12}{'/ AllR.':>9}"
    )
    for row in rows:
        theirs = f"{row['paper']:>12.1f}{row['paper_by_exact']:>9.1f}" if row["paper"] else f"{'-':>12}{'-':>9}"
        trained = (
            f"{row['loss']:>8.4f}{row['loss_by_exact']:>9.3f}{row['ratio']:>9.1f}"
            if row["loss_of"]
            else f"{'-':>8}{'-':>9}{'-':>9}"
        )
        print(
            f"  {row['name']:<26}{trained}{row['tokens_s']:>10.0f}{row['least']:>10.0f}{row['most']:>10.0f}"
            f"{row['by_exact']:>9.1f}   {theirs}"
        )


def main() -> int:
    """Measures and reports."""
    args = parse()
    repetitions = 1 if args.quick else args.repetitions
    losses = table1_losses.recorded()
    options = {"quick": args.quick, "repetitions": repetitions, "batch": Configuration().batch}
    print(report.heading("diloco_throughput", **options, losses_of_seeds=losses["seeds"], losses_of=losses["commit"]))
    rows: list[dict[str, Any]] = []
    gates: list[report.Gate] = []
    try:
        for of in RATES:
            measured = measure(of, repetitions=repetitions, quick=args.quick)
            print_table(measured)
            speed = {row["name"]: row["tokens_s"] for row in measured}
            for name, other, model in CLAIMS:
                if model != of or args.quick:
                    continue
                ends = ("", AT_THE_END) if f"{name}{AT_THE_END}" in speed else ("",)
                for end in ends:  # the other's at the same end, where it has one
                    ours, theirs = f"{name}{end}", f"{other}{end}" if f"{other}{end}" in speed else other
                    value = speed[ours] / speed[theirs]
                    gates.append(report.Gate(f"{of}: tokens a second, {ours} / {theirs}", value, ">", 1))
            rows += measured
    except (LabError, LabUnavailable) as error:
        raise SystemExit(f"diloco_throughput: {error}") from None
    return report.finish(gates, args.json, {"quick": args.quick, "losses": losses, "rows": rows})
