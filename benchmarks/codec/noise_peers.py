"""Time to perturb a tensor from a seed, against the time in which torch draws as many numbers.

benchmarks/results/noise_peers.md has the definitions.

python benchmarks noise_peers build-codec/libnoise_peers.so [--mib 256] [--repetitions 9] [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from pathlib import Path

import report
import torch

# torch.randn's time / the Gaussian axpy's, by instruction set.
_TARGETS = {"avx2": 3.2, "avx512": 5.0}
_PIECE = 1 << 18  # elements of a timed call: so many that calling from Python costs 1 %


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path, help="libnoise_peers.so, which `make bench-codec` builds")
    parser.add_argument("--mib", type=int, default=256, help="fp32 elements that are perturbed")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def fastest(
    calls: dict[str, Callable[[torch.Tensor, int], object]], y: torch.Tensor, repetitions: int
) -> dict[str, float]:
    """Seconds a pass over y, by name: the sum over its pieces of their smallest times, the calls taken in turn."""
    pieces = y.split(_PIECE)
    best = {name: [float("inf")] * len(pieces) for name in calls}
    for _ in range(repetitions):
        for name, call in calls.items():
            times = best[name]
            for i, piece in enumerate(pieces):
                start = time.perf_counter()
                call(piece, i)
                times[i] = min(times[i], time.perf_counter() - start)
    return {name: sum(times) for name, times in best.items()}


def main() -> int:
    """Measures and reports."""
    args = parse()
    library = ctypes.CDLL(str(args.library.resolve()))
    library.add_noise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_float, ctypes.c_int)
    library.add_noise.restype = None
    library.kernels_name.restype = ctypes.c_char_p
    form = library.kernels_name().decode()
    torch.set_num_threads(1)

    def axpy(gaussian: int) -> Callable[[torch.Tensor, int], object]:
        return lambda y, seed: library.add_noise(y.data_ptr(), y.numel(), seed, 1e-6, gaussian)

    calls = {
        "in-place add": lambda y, _: y.add_(1e-9),
        "torch normal_": lambda y, _: y.normal_(),
        "gaussian axpy": axpy(1),
        "rademacher axpy": axpy(0),
    }
    y = torch.zeros(args.mib << 18)
    print(report.heading("noise_peers", mib=args.mib, repetitions=args.repetitions, threads=1, kernels=form))
    print(f"# {'operation':<18} {'ns/element':>10} {'GB/s fp32':>10} {'x normal_':>10}")
    seconds = fastest(calls, y, args.repetitions)
    rows = []
    for name, taken in seconds.items():
        ratio, rate = seconds["torch normal_"] / taken, y.nbytes / taken * 1e-9
        rows.append({"operation": name, "ns": taken / y.numel() * 1e9, "gb_per_s": rate, "x_normal": ratio})
        print(f"  {name:<18} {taken / y.numel() * 1e9:>10.3f} {rate:>10.2f} {ratio:>10.2f}")
    gates = []
    if form in _TARGETS:
        ratio = seconds["torch normal_"] / seconds["gaussian axpy"]
        gates.append(report.Gate(f"{form} gaussian axpy, times as fast as torch normal_", ratio, ">=", _TARGETS[form]))
    return report.finish(gates, args.json, {"kernels": form, "mib": args.mib, "rows": rows})
