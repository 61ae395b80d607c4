"""Speed of the codecs and of other quantizers for CPUs, one thread each.

benchmarks/results/codec_peers.md has the definitions.

python benchmarks codec_peers [--mib N] [--piece N] [--repetitions N] [--json FILE]

FBGEMM comes with torch; pi-quant is measured where the package pypiquant is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path

import torch
from report import Gate, finish, heading

import torch_lowcomm as lc
from torch_lowcomm._C import kernels

FBGEMM = {2: "embedding_bag_2bit_prepack", 4: "embedding_bag_4bit_prepack", 8: "embedding_bag_byte_prepack"}

# The bound of each instruction set: (peer, rounding, bucket) -> times the peer's speed.
TARGETS = {
    "avx2": {("FBGEMM", "nearest", 512): 1.1, ("FBGEMM", "nearest", 128): 1.3},
    "avx512": {
        ("FBGEMM", "nearest", 512): 1.2,
        ("FBGEMM", "nearest", 128): 1.5,
        ("pi-quant", "nearest", 1024): 1.0,
        ("pi-quant", "stochastic", 1024): 2.5,
    },
}

Call = Callable[[int], object]


@dataclasses.dataclass
class Row:
    """One codec of ours and one of a peer, of equal bits, over the same memory."""

    peer: str
    rounding: str
    bits: int
    bucket: int  # elements that share a scale, ours; pi-quant has one scale for all it is given
    gb_per_s: float
    peer_gb_per_s: float
    memory_gb_per_s: float  # what reading the elements and writing as many bytes as their codes allows

    @property
    def ratio(self) -> float:
        """Times the peer's speed."""
        return self.gb_per_s / self.peer_gb_per_s


def best_seconds(calls: list[Call], pieces: int, repetitions: int) -> list[float]:
    """Per call the sum over the pieces of their smallest times; all calls of a piece in turn in every repetition."""
    best = [[float("inf")] * pieces for _ in calls]
    for _ in range(repetitions):
        for piece in range(pieces):
            for times, call in zip(best, calls, strict=True):
                start = time.perf_counter()
                call(piece)
                times[piece] = min(times[piece], time.perf_counter() - start)
    return [sum(times) for times in best]


def ours(x: torch.Tensor, name: str, bucket: int) -> Call:
    """Encodes piece i of x [pieces, elements]."""
    codec = lc.codec(f"{name}:bucket={bucket}")
    return lambda i: codec.encode(x[i], seed=1, step=i)


def fbgemm(x: torch.Tensor, bits: int, bucket: int) -> Call:
    """One scale a row, as ours one a bucket; float16 scales, but 8 bits has float32 ones."""
    pack = getattr(torch.ops.quantized, FBGEMM[bits])
    rows = x.view(x.size(0), -1, bucket)
    return lambda i: pack(rows[i])


def piquant(x: torch.Tensor, bits: int, rounding: str) -> Call:
    """One scale for the whole piece: its parameters are computed, then its elements quantized."""
    import piquant as pq

    context = pq.Context(num_threads=1)
    target = {2: pq.DataType.UINT2, 4: pq.DataType.UINT4, 8: pq.DataType.UINT8}[bits]
    mode = pq.RoundMode.NEAREST if rounding == "nearest" else pq.RoundMode.STOCHASTIC
    elements = x.size(1)
    codes = torch.empty(elements * bits // 8, dtype=torch.uint8)

    def call(i: int) -> None:
        source = x[i].data_ptr()
        scale, zero = context.compute_quant_params_ptr_float32(source, target, elements)
        context.quantize_ptr(source, pq.DataType.F32, codes.data_ptr(), target, elements, scale, zero, mode)

    return call


def plain_read(x: torch.Tensor) -> Call:
    """Reads piece i as a codec does, with next to no arithmetic: torch's vectorized sum."""
    return lambda i: x[i].sum()


def plain_write(x: torch.Tensor, bits: int) -> Call:
    """Writes new memory of as many bytes as a piece's codes."""
    return lambda i: torch.empty(x.size(1) * bits // 8, dtype=torch.uint8).fill_(1)


def measure(mib: int, piece: int, repetitions: int) -> list[Row]:
    """All rows; pi-quant's only where its package is."""
    torch.manual_seed(0)
    pieces = max(1, mib * 2**18 // piece)
    x = torch.randn(piece).repeat(pieces).view(pieces, piece)
    cases: list[tuple[str, str, int, int, Call, Call]] = []
    for bucket in (512, 128):
        for bits in (2, 4, 8):
            mine = ours(x, f"minmax{bits}", bucket)
            cases.append(("FBGEMM", "nearest", bits, bucket, mine, fbgemm(x, bits, bucket)))
    if importlib.util.find_spec("piquant"):
        for rounding, name in (("nearest", "minmax"), ("stochastic", "qsgd")):
            for bits in (4, 8):
                mine = ours(x, f"{name}{bits}", 1024)
                cases.append(("pi-quant", rounding, bits, 1024, mine, piquant(x, bits, rounding)))
    rows = []
    for peer, rounding, bits, bucket, mine, theirs in cases:
        own, other, read, write = best_seconds([mine, theirs, plain_read(x), plain_write(x, bits)], pieces, repetitions)
        rates = [x.numel() * 4 / seconds * 1e-9 for seconds in (own, other, read + write)]
        rows.append(Row(peer, rounding, bits, bucket, *rates))
    return rows


def measure_memory(mib: int, repetitions: int) -> list[dict[str, float | str]]:
    """GB/s of fp32 that encode and decode make, by the memory that their results are in."""
    codec, x = lc.codec("minmax8:bucket=1024"), torch.randn(1 << 20).repeat(mib // 4)
    payload, y = codec.encode(x), torch.empty_like(x)
    given = torch.empty_like(payload)
    kept: list[torch.Tensor] = []  # no result is given back before the next one is made: all memory is new
    calls: dict[tuple[str, str], Call] = {
        ("encode", "new"): lambda i: kept.append(codec.encode(x)),
        ("encode", "kept"): lambda i: codec.encode(x),
        ("encode", "out="): lambda i: codec.encode(x, out=given),
        ("decode", "new"): lambda i: kept.append(codec.decode(payload, len(x))),
        ("decode", "kept"): lambda i: codec.decode(payload, len(x)),
        ("decode", "out="): lambda i: codec.decode(payload, len(x), out=y),
    }
    rows: list[dict[str, float | str]] = []
    for (call, memory), run in calls.items():
        (seconds,) = best_seconds([run], 1, repetitions)
        kept.clear()
        rows.append({"call": call, "memory": memory, "gb_per_s": x.nbytes / seconds * 1e-9})
    return rows


def main() -> int:
    """The exit status: 1 when a gate fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="float32 elements that are encoded, in MiB")
    parser.add_argument("--piece", type=int, default=1 << 22, help="elements of a timed call, a multiple of 1024")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.piece <= 0 or arguments.piece % 1024:
        parser.error(f"--piece: expected a positive multiple of 1024, got {arguments.piece}")
    torch.set_num_threads(1)
    form = kernels()
    configuration = {"mib": arguments.mib, "piece": arguments.piece, "repetitions": arguments.repetitions}
    print(heading("codec_peers", kernels=form, **configuration, threads=1))
    print(
        f"# {'peer':<10} {'rounding':<10} {'bits':>4} {'bucket':>6} {'GB/s fp32':>10} {'peer':>8} {'memory':>8} {'ratio':>6}"
    )
    rows = measure(**configuration)
    gates = []
    for row in rows:
        print(
            f"  {row.peer:<10} {row.rounding:<10} {row.bits:>4} {row.bucket:>6} {row.gb_per_s:>10.2f} "
            f"{row.peer_gb_per_s:>8.2f} {row.memory_gb_per_s:>8.2f} {row.ratio:>6.2f}"
        )
        bound = TARGETS.get(form, {}).get((row.peer, row.rounding, row.bucket))
        if bound is not None:
            name = f"{form} {row.rounding} {row.bits} bits, bucket {row.bucket}, times {row.peer}"
            gates.append(Gate(name, row.ratio, ">=", bound))
    if not any(row.peer == "pi-quant" for row in rows):
        print("pi-quant is not installed: pip install --no-deps pypiquant cffi")
    memory = measure_memory(128, repetitions=5)
    print("# call       memory    GB/s fp32, minmax8, 128 MiB")
    for of in memory:
        print(f"  {of['call']:<10} {of['memory']:<8} {of['gb_per_s']:>10.2f}")
    content = {
        "memory": memory,
        "configuration": {"kernels": form, **configuration},
        "rows": [{**dataclasses.asdict(row), "ratio": row.ratio} for row in rows],
    }
    return finish(gates, arguments.json, content)
