"""The command: `python benchmarks diloco …`."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import report
from linklab import LabError, LabUnavailable
from steps.cases import MODELS

from diloco import gates, memory, table, torchft_loop
from diloco.cases import chosen
from diloco.measure import measure


def parse() -> argparse.Namespace:
    """Reads and checks the command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks diloco", description="What an outer loop costs and saves on slow links."
    )
    parser.add_argument(
        "--rate", nargs="*", default=["100mbit", "10mbit"], help="of every host (100mbit 10mbit); none: memory alone"
    )
    parser.add_argument("--model", choices=sorted(MODELS), default="10M")
    parser.add_argument("--batch", type=int, default=8, help="windows of 64 bytes a rank and step (8)")
    parser.add_argument("--every", type=int, default=20, help="H, inner steps a round (20)")
    parser.add_argument("--rounds", type=int, default=3, help="of a training, the first of them not timed (3)")
    parser.add_argument("--repetitions", type=int, default=3, help="trainings of every case, in turn (3)")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="cases whose names hold one of these")
    parser.add_argument("--no-memory", action="store_true", help="without the memory of the outer state")
    parser.add_argument("--json", type=Path, help="versions, machine, rows, gates")
    args = parser.parse_args()
    for name, least in (("batch", 1), ("every", 12), ("rounds", 2), ("repetitions", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name}: expected {least} or more, got {getattr(args, name)}")
    return args


def main() -> int:
    """Runs every rate, then the memory, and reports."""
    args = parse()
    options = {name: getattr(args, name) for name in ("model", "batch", "every", "rounds", "repetitions")}
    peer = torchft_loop.available()
    print(report.heading("diloco", **(options | {"torchft": torchft_loop.version()} if args.rate else {})))
    links: list[dict[str, Any]] = []
    held: list[report.Gate] = []
    kept: list[memory.Row] = []
    try:
        for rate in args.rate:
            rows = measure(chosen(args.only, peer=peer), rate=rate, **options)
            print(table.of_link(rows), flush=True)
            held += gates.of_link(rows)
            links.append({"rate": rate, "rows": [dataclasses.asdict(row) for row in rows]})
        if not args.no_memory:
            kept = memory.measure()
            print(table.of_memory(kept), flush=True)
            held += gates.of_memory(kept)
    except (LabError, LabUnavailable, ValueError) as error:
        raise SystemExit(f"diloco: {error}") from None
    content = {**options, "torchft": torchft_loop.version(), "links": links}
    return report.finish(held, args.json, content | {"memory": [dataclasses.asdict(row) for row in kept]})
