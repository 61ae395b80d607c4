"""What resets of connections cost ops over lowcomm's own TCP transport, and that they lose nothing.

    python benchmarks tcp_cuts [--quick] [--json FILE]        # as root

benchmarks/results/tcp_cuts.md has the definitions.
"""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path
from typing import Any

import report
from linklab import Lab, LabError, LabUnavailable
from linklab.job import run_on_hosts

RATE = "100mbit"
EVERY_S = (0.0, 1.0, 0.4, 0.25)
SOAK_EVERY_S = 0.1
MOST_TIMES, MOST_GROWN_MIB = 1.5, 16


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few ops")
    parser.add_argument("--json", type=Path, help="versions, machine, rows, gates")
    return parser.parse_args()


def measure(hosts: int, rate: str, ops: int, every_s: tuple[float, ...], secret: str) -> list[dict[str, Any]]:
    """A row a period: the slowest rank's seconds, the most that one grew, and all ranks' connections and wrong results."""
    job = {"ops": ops, "every_s": every_s, "secret": secret}
    with Lab(hosts=hosts, rate=rate) as lab:
        of_ranks = run_on_hosts(lab, "faults.tcp_cuts_rank", job)
    rows = []
    for mine in zip(*of_ranks, strict=True):
        row = {"hosts": hosts, "link": rate, "secret": bool(secret), "ops": ops, "every_s": mine[0]["every_s"]}
        row |= {key: max(one[key] for one in mine) for key in ("seconds", "grown_mib")}
        row |= {key: sum(one[key] for one in mine) for key in ("made", "wrong")}
        rows.append(row)
    for row in rows:
        row["times"] = row["seconds"] / rows[0]["seconds"]
    return rows


def show(row: dict[str, Any]) -> None:
    """A line."""
    every = f"{row['every_s']:g} s" if row["every_s"] else "never"
    where = (
        f"  {row['hosts']:>5}  {row['link']:<10}{'secret' if row['secret'] else 'plain':<8}{row['ops']:>8}{every:>8}"
    )
    cost = f"{row['seconds']:>10.2f}{row['times']:>8.2f}{row['grown_mib']:>10.1f}"
    print(f"{where}{row['made']:>8}{row['wrong']:>8}{cost}", flush=True)


def run(*, quick: bool) -> tuple[list[dict[str, Any]], list[report.Gate]]:
    """Measures slow links, then the soak, plain and encrypted."""
    rows: list[dict[str, Any]] = []
    held = []
    for hosts in (2, 4):
        for secret in ("", secrets.token_urlsafe(32)):
            name = f"{hosts} hosts, {'secret' if secret else 'plain'}"
            for row in measure(hosts, RATE, 24 if quick else 240, EVERY_S[:2] if quick else EVERY_S, secret):
                show(row)
                rows.append(row)
                if row["every_s"]:
                    what = f"{name}, {RATE}, resets every {row['every_s']:g} s: seconds / without"
                    held.append(report.Gate(what, row["times"], "<=", MOST_TIMES))
            (row,) = measure(hosts, "unshaped", 240 if quick else 10_000, (SOAK_EVERY_S,), secret)
            show(row)
            rows.append(row)
            what = f"{name}, unshaped, {row['ops']} ops"
            held.append(report.Gate(f"{what}: MiB that a rank grew", row["grown_mib"], "<=", MOST_GROWN_MIB))
            held.append(report.Gate(f"{what}: connections made", row["made"], ">", 0))
    held.append(report.Gate("results that are not the undisturbed ones", sum(r["wrong"] for r in rows), "==", 0))
    return rows, held


def main() -> int:
    """Runs all, and reports."""
    args = parse()
    print(report.heading("tcp_cuts", quick=args.quick))
    print(f"# {'hosts':>5}  {'link':<18}{'ops':>8}{'every':>8}{'made':>8}{'wrong':>8}", end="")
    print(f"{'seconds':>10}{'times':>8}{'MiB more':>10}")
    try:
        rows, held = run(quick=args.quick)
    except (LabError, LabUnavailable) as error:
        raise SystemExit(f"tcp_cuts: {error}") from None
    return report.finish(held, args.json, {"rows": rows})
