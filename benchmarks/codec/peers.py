"""Speed of the codecs and of other quantizers for CPUs, one thread each.

benchmarks/results/codec_peers.md has the definitions.

python benchmarks codec_peers [--mib N] [--piece N] [--repetitions N] [--json FILE]

FBGEMM comes with torch; pi-quant is measured where the package pypiquant is installed.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from collections.abc import Callable

import report
import torch
from report import Gate, finish, heading
from tables import Columns

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


def main() -> int:
    """The exit status: 1 when a gate fails."""
    parser = report.arguments(__doc__, repetitions=9)
    parser.add_argument("--mib", type=int, default=256, help="float32 elements that are encoded, in MiB")
    parser.add_argument("--piece", type=int, default=1 << 22, help="elements of a timed call, a multiple of 1024")
    arguments = parser.parse_args()
    if arguments.piece <= 0 or arguments.piece % 1024:
        parser.error(f"--piece: expected a positive multiple of 1024, got {arguments.piece}")
    torch.set_num_threads(1)
    form = kernels()
    configuration = {"mib": arguments.mib, "piece": arguments.piece, "repetitions": arguments.repetitions}
    print(heading("codec_peers", kernels=form, **configuration, threads=1))
    columns = Columns(
        "peer 10 | rounding 11 | bits 5 | bucket 7 | GB/s fp32 11.2f | peer 9.2f | memory 9.2f | ratio 7.2f"
    )
    print(columns.heading())
    rows = measure(**configuration)
    gates = []
    for row in rows:
        rates = row.gb_per_s, row.peer_gb_per_s, row.memory_gb_per_s
        print(columns.row(row.peer, row.rounding, row.bits, row.bucket, *rates, row.ratio))
        bound = TARGETS.get(form, {}).get((row.peer, row.rounding, row.bucket))
        if bound is not None:
            name = f"{form} {row.rounding} {row.bits} bits, bucket {row.bucket}, times {row.peer}"
            gates.append(Gate(name, row.ratio, ">=", bound))
    if not any(row.peer == "pi-quant" for row in rows):
        print("pi-quant is not installed: pip install --no-deps pypiquant cffi")
    content = {
        "configuration": {"kernels": form, **configuration},
        "rows": [{**dataclasses.asdict(row), "ratio": row.ratio} for row in rows],
    }
    return finish(gates, arguments.json, content)
