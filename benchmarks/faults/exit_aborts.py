"""Counts runs that abort at exit: two ranks train with DDP, destroy their group and leave; gloo against lowcomm.

    python benchmarks exit_aborts [RUNS] [--start spawn|fork] [--backends gloo lowcomm] [--json FILE]

Each run is two interpreters. benchmarks/results/exit_aborts.md defines the columns. The exit
status is 1 when a run on lowcomm aborted.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import ranks
import report
import torch
import torch.distributed as dist
from report import Gate

RANKS, STEPS = 2, 10
DEADLINE_S = 60


def train(r: ranks.Rank, backend: str) -> str:
    """A few steps of a small model under DDP; the group is destroyed and the interpreter ends."""
    r.init(backend)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        wrapped(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()
    return "trained"


def count(backend: str, runs: int, start: str) -> dict[str, Any]:
    """One row: how `runs` runs ended."""
    codes: dict[str, int] = {}
    began = time.monotonic()
    any_code = {r: range(-64, 256) for r in range(RANKS)}
    for _ in range(runs):
        ended: list[int] = []
        how = {"timeout": DEADLINE_S, "allow_exit": any_code, "start": start, "exit_codes": ended}
        try:
            answers = ranks.run_ranks(train, RANKS, backend, **how)
        except ranks.RanksFailed as failure:
            if "no end within" not in str(failure):
                raise
            codes["hung"] = codes.get("hung", 0) + 1
            continue
        if answers != ["trained"] * RANKS:
            raise SystemExit(f"exit_aborts.py: a rank on {backend} did not train to its end: {answers}, exits {ended}")
        if any(ended):
            key = " ".join(str(code) for code in sorted(ended) if code)
            codes[key] = codes.get(key, 0) + 1
    return {
        "backend": backend,
        "runs": runs,
        "aborted": sum(codes.values()),
        "exit_codes": codes,
        "seconds": time.monotonic() - began,
    }


def line(row: dict[str, Any]) -> str:
    """A fixed-width row."""
    codes = ", ".join(f"{key}: {times}" for key, times in row["exit_codes"].items()) or "-"
    return f"  {row['backend']:<10}{row['runs']:>6}{row['aborted']:>9}{row['seconds']:>9.1f}  {codes}"


def main() -> int:
    """Counts and reports."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", metavar="RUNS", type=int, nargs="?", default=50, help="of each backend")
    parser.add_argument("--start", choices=("spawn", "fork"), default="spawn", help="fork: from one process with torch")
    parser.add_argument("--backends", nargs="+", default=["gloo", "lowcomm"])
    parser.add_argument("--json", type=Path, help="versions, machine, rows, gates")
    args = parser.parse_args()
    if args.runs < 1:
        parser.error(f"RUNS: expected a positive number, got {args.runs}")
    options = {"ranks": RANKS, "steps": STEPS, "start": args.start, "deadline_s": DEADLINE_S}
    print(report.heading("exit_aborts", **options))
    print(f"# {'backend':<10}{'runs':>6}{'aborted':>9}{'seconds':>9}  exit codes", flush=True)
    rows = []
    for backend in args.backends:
        rows.append(count(backend, args.runs, args.start))
        print(line(rows[-1]), flush=True)
    ranks.close_zygote()
    gates = [
        Gate(f"runs that aborted on {row['backend']}", row["aborted"], "==", 0)
        for row in rows
        if row["backend"] == "lowcomm"
    ]
    return report.finish(gates, args.json, {"options": options, "rows": rows})
