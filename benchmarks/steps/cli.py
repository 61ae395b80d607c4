"""The command: `python benchmarks steps METHOD …`."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import report
from linklab import LabError, LabUnavailable

from steps.cases import CASES, MODELS
from steps.measure import Row, measure

SHARE = 0.85  # of the bound, at 100 Mbit/s


def parse() -> argparse.Namespace:
    """Reads and checks the command line."""
    parser = argparse.ArgumentParser(prog="steps", description="Seconds a data parallel step takes on slow links.")
    parser.add_argument("method", choices=sorted(CASES))
    parser.add_argument("--rate", nargs="+", default=["100mbit"], help="of every host, e.g. 10mbit 100mbit 1gbit")
    parser.add_argument("--model", choices=sorted(MODELS), default="10M")
    parser.add_argument("--batch", type=int, default=8, help="windows of 64 bytes a rank and step (8)")
    parser.add_argument("--repetitions", type=int, default=9, help="steps of every case, in turn (9)")
    parser.add_argument("--json", type=Path, help="versions, machine, rows, gates")
    args = parser.parse_args()
    for name in ("batch", "repetitions"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: expected a positive number, got {getattr(args, name)}")
    return args


def show(comp: float, rows: list[Row]) -> None:
    """A line a case."""
    print(f"# {rows[0].rate}: computing takes {comp:.3f} s a step")
    print(
        f"# {'case':<32}{'s a step':>10}{'least':>8}{'most':>8}{'sent MB':>10}{'ratio':>8}{'speed':>8}{'bound':>8}{'share':>7}"
    )
    for row in rows:
        print(
            f"  {row.name:<32}{row.seconds:>10.3f}{row.least_s:>8.3f}{row.most_s:>8.3f}{row.sent / 1e6:>10.3f}"
            f"{row.ratio:>8.2f}{row.speedup:>8.2f}{row.bound:>8.2f}{row.share:>7.2f}",
            flush=True,
        )


def gates_of(method: str, rows: list[Row]) -> list[report.Gate]:
    """Returns the claims about lowcomm's rows at 100 Mbit/s."""
    named = {row.name: row for row in rows}
    gates = [
        report.Gate(f"{method}, {row.rate}: {row.name}, share of the bound", row.share, ">=", SHARE)
        for row in rows
        if not row.peer and row.rate == "100mbit"
    ]
    # The setting that has PowerSGD's loss (`convergence ddp`), and no other, is to be smaller and faster too.
    ours, theirs = named.get("lowcomm rank 4, sym8"), named.get("gloo, torch's PowerSGD rank 4")
    if ours and theirs and ours.rate == "100mbit":
        gates.append(report.Gate(f"{method}: PowerSGD's bytes over ours, rank 4", theirs.sent / ours.sent, ">=", 3.0))
        gates.append(
            report.Gate(f"{method}: PowerSGD's step over ours, rank 4", theirs.seconds / ours.seconds, ">", 1.0)
        )
    return gates


def main() -> int:
    """Runs every rate and reports."""
    args = parse()
    print(report.heading(f"steps {args.method}", model=args.model, batch=args.batch, repetitions=args.repetitions))
    content, gates = [], []
    try:
        for rate in args.rate:
            comp, rows = measure(
                args.method,
                CASES[args.method],
                rate=rate,
                model=args.model,
                batch=args.batch,
                repetitions=args.repetitions,
            )
            show(comp, rows)
            gates += gates_of(args.method, rows)
            content.append({"rate": rate, "comp_s": comp, "rows": [dataclasses.asdict(row) for row in rows]})
    except (LabError, LabUnavailable, ValueError) as error:
        raise SystemExit(f"steps: {error}") from None
    chosen = {"method": args.method, "model": args.model, "batch": args.batch, "repetitions": args.repetitions}
    return report.finish(gates, args.json, {**chosen, "links": content})
