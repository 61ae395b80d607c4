"""Speed of `lc.codec(…).encode` and `decode` by where results go: given memory, pooled memory, memory new to the process.

benchmarks/results/codec_memory.md has the definitions.

python benchmarks codec_memory [--mib N] [--repetitions N] [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import Gate, finish, heading

import torch_lowcomm as lc

CODECS = ("sym8:bucket=1024", "minmax4:bucket=1024")
SLOWEST = 0.8  # speed with pooled memory / with given memory


@dataclasses.dataclass
class Row:
    """One way of one codec."""

    codec: str
    operation: str
    memory: str
    gb_per_s: float  # of float32 elements
    of_given: float  # times the speed with out=


def smallest_seconds(calls: dict[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
    """The smallest over the repetitions; the calls take turns, and a result is dropped before the next call."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(repetitions):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def ways(codec: lc.codec, x: torch.Tensor) -> dict[str, dict[str, Callable[[], object]]]:
    """Calls by operation and memory; `new` asks the system for its pages, as any first result of a process does."""
    payload, y = codec.encode(x, seed=1), torch.empty_like(x)

    def in_new_memory(like: torch.Tensor, run: Callable[[torch.Tensor], object]) -> None:
        run(torch.empty_like(like))

    encode = lambda out: codec.encode(x, seed=1, out=out)  # noqa: E731
    decode = lambda out: codec.decode(payload, x.numel(), out=out)  # noqa: E731
    return {
        "encode": {
            "given": lambda: encode(payload),
            "pooled": lambda: codec.encode(x, seed=1),
            "new": lambda: in_new_memory(payload, encode),
        },
        "decode": {
            "given": lambda: decode(y),
            "pooled": lambda: codec.decode(payload, x.numel()),
            "new": lambda: in_new_memory(y, decode),
        },
    }


def main() -> int:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=128, help="of float32")
    parser.add_argument("--repetitions", type=int, default=25)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(args.mib << 18)
    print(heading("codec_memory", mib=args.mib, repetitions=args.repetitions, threads=1))
    print(f"# {'codec':<24}{'operation':<11}{'memory':<8}{'GB/s fp32':>10}{'x given':>9}")
    rows = []
    for text in CODECS:
        for operation, calls in ways(lc.codec(text), x).items():
            seconds = smallest_seconds(calls, args.repetitions)
            for memory, taken in seconds.items():
                row = Row(text, operation, memory, x.nbytes / taken / 1e9, seconds["given"] / taken)
                rows.append(row)
                print(f"  {row.codec:<24}{row.operation:<11}{row.memory:<8}{row.gb_per_s:>10.2f}{row.of_given:>9.2f}")
    gates = [
        Gate(f"{row.codec} {row.operation}, pooled / given memory, speed", row.of_given, ">=", SLOWEST)
        for row in rows
        if row.memory == "pooled"
    ]
    content: dict[str, Any] = {"mib": args.mib, "rows": [dataclasses.asdict(row) for row in rows]}
    return finish(gates, args.json, content)


if __name__ == "__main__":
    raise SystemExit(main())
