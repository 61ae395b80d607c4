"""The products of low-rank compression in their fixed order, against torch.matmul on one thread.

benchmarks/results/low_rank_peers.md has the definitions.

python benchmarks low_rank_peers build-codec/liblow_rank_peers.so [--rows 256] [--columns 1024] [--rank 4] [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from pathlib import Path

import report
import torch

_PRODUCTS = ("P = A Q", "R = A' P", "P R'", "A - P R'")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path, help="liblow_rank_peers.so, which `make bench-codec` builds")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--columns", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def fastest(calls: dict[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
    """The smallest seconds of each call, taken in turn."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(repetitions):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def main() -> int:
    """Measures and reports."""
    args = parse()
    library = ctypes.CDLL(str(args.library.resolve()))
    library.low_rank.argtypes = (ctypes.c_int, *[ctypes.c_void_p] * 4, *[ctypes.c_size_t] * 3)
    library.low_rank.restype = None
    library.kernels_name.restype = ctypes.c_char_p
    form = library.kernels_name().decode()
    torch.set_num_threads(1)
    m, n, k = args.rows, args.columns, args.rank
    a, out = torch.randn(m, n), torch.empty(m, n)
    p, r = torch.randn(k, m), torch.randn(k, n)
    ours, theirs = torch.empty(k, m), torch.empty(k, n)  # results, in addition to what is read

    def product(number: int) -> Callable[[], None]:
        mine = {
            0: (out, a, ours, r),
            1: (out, a, p, theirs),
            2: (out, a, p, r),
            3: (out, a, p, r),
            4: (out, a, ours, r),
        }
        pointers = [t.data_ptr() for t in mine[number]]
        return lambda: library.low_rank(number, *pointers, m, n, k)

    pt, rt, q = p.t().contiguous(), r.t().contiguous(), torch.empty(m, k)
    torchs = (
        lambda: torch.mm(a, rt, out=q),
        lambda: torch.mm(a.t(), pt),
        lambda: torch.mm(pt, rt.t(), out=out),
        lambda: torch.addmm(a, pt, rt.t(), alpha=-1, out=out),
    )
    calls = {name: product(i) for i, name in enumerate(_PRODUCTS)}
    calls |= {f"torch {name}": call for name, call in zip(_PRODUCTS, torchs, strict=True)}
    calls["orthonormalise P"] = product(4)
    print(report.heading("low_rank_peers", rows=m, columns=n, rank=k, threads=1, kernels=form))
    print(f"# {'operation':<18} {'us':>8} {'GFLOP/s':>8} {'torch':>8}")
    seconds = fastest(calls, args.repetitions)
    rows = []
    for name in _PRODUCTS:
        taken, peer = seconds[name], seconds[f"torch {name}"]
        rate, torchs_rate = (2e-9 * m * n * k / t for t in (taken, peer))
        rows.append({"operation": name, "us": taken * 1e6, "gflops": rate, "torch_gflops": torchs_rate})
        print(f"  {name:<18} {taken * 1e6:>8.1f} {rate:>8.2f} {torchs_rate:>8.2f}")
    rows.append({"operation": "orthonormalise P", "us": seconds["orthonormalise P"] * 1e6})
    print(f"  {'orthonormalise P':<18} {seconds['orthonormalise P'] * 1e6:>8.1f}")
    whole = sum(seconds[name] for name in (*_PRODUCTS, "orthonormalise P"))
    exact_link = m * n * 4 * 8 / 1e9  # what the uncoded matrix takes at 1 Gbit/s
    print(f"# all of them: {whole * 1e6:.0f} us; the matrix uncoded at 1 Gbit/s: {exact_link * 1e6:.0f} us")
    gates = [report.Gate("time / link time of the uncoded matrix at 1 Gbit/s", whole / exact_link, "<=", 0.25)]
    data = {"kernels": form, "rows": m, "columns": n, "rank": k, "products": rows, "all_us": whole * 1e6}
    return report.finish(gates, args.json, data)
