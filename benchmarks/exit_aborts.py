"""Counts runs that abort at exit: two ranks train with DDP, destroy their group and leave; gloo against lowcomm.

    python benchmarks/exit_aborts.py 50

Each run is two fresh interpreters. A run counts as aborted when a rank's exit code is not 0 though its training came to
its end, or did not end within a minute. Prints a row a backend and PASS when lowcomm has none; the exit code says so too.
"""

import argparse
import json
import pathlib
import platform
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "python"))

import ranks
import torch
import torch.distributed as dist


def train(r: ranks.Rank, backend: str) -> str:
    """Ten steps of a small model under DDP; the group is destroyed and the interpreter ends."""
    r.init(backend)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        wrapped(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()
    return "trained"


def count(backend: str, runs: int, start: str) -> dict[str, object]:
    """The exit codes of `runs` runs: a dictionary fit for JSON."""
    codes: dict[str, int] = {}
    began = time.monotonic()
    any_code = {r: range(-64, 256) for r in range(2)}
    for _ in range(runs):
        ended: list[int] = []
        try:
            answers = ranks.run_ranks(train, 2, backend, timeout=60, allow_exit=any_code, start=start, exit_codes=ended)
        except ranks.RanksFailed as failure:
            if "no end within" not in str(failure):
                raise
            codes["hung"] = codes.get("hung", 0) + 1
            continue
        if answers != ["trained", "trained"]:
            raise SystemExit(f"{backend}: a rank did not come to its end: {answers}, exit codes {ended}")
        if any(ended):
            key = str(sorted(c for c in ended if c))
            codes[key] = codes.get(key, 0) + 1
    return {
        "backend": backend,
        "runs": runs,
        "aborted": sum(codes.values()),
        "exit_codes": codes,
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> int:
    """Parses arguments, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=int, nargs="?", default=50)
    parser.add_argument("--start", choices=("spawn", "fork"), default="spawn", help="fork: from one process with torch")
    parser.add_argument("--backends", nargs="*", default=["gloo", "lowcomm"])
    parser.add_argument("--json", type=pathlib.Path, help="write the rows there")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, Python {platform.python_version()}, 2 ranks, DDP, {args.start}")
    print(f"{'backend':<10}{'runs':>6}{'aborted':>9}{'seconds':>9}  exit codes")
    rows = []
    for backend in args.backends:
        row = count(backend, args.runs, args.start)
        rows.append(row)
        print(f"{backend:<10}{row['runs']:>6}{row['aborted']:>9}{row['seconds']:>9}  {row['exit_codes']}", flush=True)
    ranks.close_zygote()
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))
    bad = [row for row in rows if row["backend"] == "lowcomm" and row["aborted"]]
    print("FAIL" if bad else "PASS")
    return int(bool(bad))


if __name__ == "__main__":
    # The ranks import this file by its name.
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
    import exit_aborts

    sys.exit(exit_aborts.main())
