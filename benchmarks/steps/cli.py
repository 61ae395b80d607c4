"""The command: `python benchmarks steps METHOD …`."""

from __future__ import annotations

import dataclasses

import report
from tables import Columns

from steps.cases import CASES, MODELS
from steps.measure import Row, measure

SHARE = 0.85  # of the bound, at 100 Mbit/s
COLUMNS = Columns(
    "case 32 | s a step 10.3f | least 8.3f | most 8.3f | sent MB 10.3f | ratio 8.2f | speed 8.2f | "
    "bound 8.2f | share 7.2f"
)


def show(comp: float, rows: list[Row]) -> None:
    """A line a case."""
    print(f"# {rows[0].rate}: computing takes {comp:.3f} s a step\n{COLUMNS.heading()}")
    for row in rows:
        speeds = row.ratio, row.speedup, row.bound, row.share
        print(COLUMNS.row(row.name, row.seconds, row.least_s, row.most_s, row.sent / 1e6, *speeds), flush=True)


def gates_of(method: str, rows: list[Row]) -> list[report.Gate]:
    """Returns the claims about lowcomm's rows at 100 Mbit/s."""
    if rows[0].rate != "100mbit":
        return []
    named = {row.name: row for row in rows}
    gates = [
        report.Gate(f"{method}, {row.rate}: {row.name}, share of the bound", row.share, ">=", SHARE)
        for row in rows
        if not row.peer
    ]
    # The setting that has PowerSGD's loss (`convergence ddp`), and no other, is to be smaller and faster too.
    ours, theirs = named.get("lowcomm rank 4, sym8"), named.get("gloo, torch's PowerSGD rank 4")
    if ours and theirs:
        gates.append(report.Gate(f"{method}: PowerSGD's bytes over ours, rank 4", theirs.sent / ours.sent, ">=", 3.0))
        faster = theirs.seconds / ours.seconds
        gates.append(report.Gate(f"{method}: PowerSGD's step over ours, rank 4", faster, ">", 1.0))
    return gates


def main() -> int:
    """Runs every rate and reports."""
    parser = report.arguments("Seconds a data parallel step takes on slow links; as root.", repetitions=9)
    parser.add_argument("method", choices=sorted(CASES))
    parser.add_argument("--rate", nargs="+", default=["100mbit"], help="of every host, e.g. 10mbit 100mbit 1gbit")
    parser.add_argument("--model", choices=sorted(MODELS), default="10M")
    parser.add_argument("--batch", type=report.positive, default=8, help="windows of 64 bytes a rank and step (8)")
    args = parser.parse_args()
    options = {"model": args.model, "batch": args.batch, "repetitions": args.repetitions}
    print(report.heading(f"steps {args.method}", **options))
    content, gates = [], []
    for rate in args.rate:
        comp, rows = measure(args.method, CASES[args.method], rate=rate, **options)
        show(comp, rows)
        gates += gates_of(args.method, rows)
        content.append({"rate": rate, "comp_s": comp, "rows": [dataclasses.asdict(row) for row in rows]})
    return report.finish(gates, args.json, {"method": args.method, **options, "links": content})
