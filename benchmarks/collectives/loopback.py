"""Quantized all_gather_into_tensor and reduce_scatter_tensor next to gloo's exact ones: 2 ranks, loopback, fp32 sums.

    python benchmarks collectives [--mib 1 16 64] [--repetitions 15] [--json FILE]

One pair of processes holds three groups, gloo, lowcomm exact and lowcomm at 8 bits, and takes them in turn within
every repetition, so that what else the machine does meets all three. benchmarks/results/collectives.md defines the columns. The
exit status is 1 when a result is out of its bound or a quantized op is not faster than gloo's at the largest size.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launch
import report
import torch
import torch.distributed as dist
from measure import sent_bytes
from report import Gate
from torch import Tensor

import torch_lowcomm as lc

RANKS = 2
BUCKET = 1024
CODECS = {"all_gather": f"minmax8:bucket={BUCKET}", "reduce_scatter": f"qsgd8:bucket={BUCKET}"}
WARM_UP = 3


def measure(rank: int, init_method: str, *, mib: list[int], repetitions: int) -> list[dict[str, Any]]:
    """One rank: times every op, size and group; a repetition lasts as long as its slowest rank."""
    # The newer names of both ops are in torch 2.13 and later only.
    warnings.filterwarnings("ignore", "`torch.distributed.*` is deprecated", FutureWarning)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=RANKS)
    policy = "; ".join(f"{op}={codec}" for op, codec in CODECS.items())
    groups = {
        "gloo": dist.group.WORLD,
        "lowcomm none": dist.new_group(backend="lowcomm"),
        "lowcomm 8 bits": dist.new_group(backend="lowcomm", pg_options=lc.Options(policy=policy)),
    }
    rows = []
    for op in CODECS:
        for size in mib:
            case = CASES[op](rank, size)
            seconds: dict[str, list[float]] = {name: [] for name in groups}
            sent = {name: 0 for name in groups}
            for repetition in range(-WARM_UP, repetitions):
                for name, group in groups.items():
                    before = sent_bytes(op)
                    dist.barrier()
                    start = time.perf_counter()
                    case.call(group)
                    took = torch.tensor(time.perf_counter() - start)
                    sent[name] = sent_bytes(op) - before
                    dist.all_reduce(took, op=dist.ReduceOp.MAX)
                    if repetition >= 0:
                        seconds[name].append(took.item())
            for name, group in groups.items():
                case.output.fill_(float("nan"))
                case.call(group)
                error = (case.output - case.exact).abs()
                # Without a codec the bound is 0: a sum of two numbers has no order to depend on.
                allowed = case.bound if name == "lowcomm 8 bits" else torch.zeros(())
                row = {
                    "op": op,
                    "mib": size,
                    "group": name,
                    "seconds": seconds[name],
                    "sent_bytes": sent[name],
                    "max_error": error.max().item(),
                    "outside": int((~(error <= allowed)).sum()),
                }
                rows.append(row)
    dist.barrier()
    dist.destroy_process_group()
    return rows


@dataclasses.dataclass
class Case:
    """A collective with its tensors allocated, its exact result, and how far from it 8 bits may be, elementwise."""

    call: Callable[[dist.ProcessGroup], None]
    output: Tensor
    exact: Tensor
    bound: Tensor


def normal(rank: int, elements: int) -> Tensor:
    """Rank's fp32 N(0, 1) tensor, known to every rank."""
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank))


def all_gather(rank: int, mib: int) -> Case:
    """`mib` is the size of the output, all ranks' shards."""
    shards = [normal(r, mib * 2**18 // RANKS) for r in range(RANKS)]
    exact = torch.cat(shards)
    output = torch.empty_like(exact)
    rounding = 2**-22 * exact.abs().max()
    return Case(
        call=lambda group: dist.all_gather_into_tensor(output, shards[rank], group=group),
        output=output,
        exact=exact,
        bound=0.5002 * steps(exact) + rounding,
    )


def reduce_scatter(rank: int, mib: int) -> Case:
    """`mib` is the size of the input, a rank's contribution to all shards."""
    inputs = [normal(r, mib * 2**18) for r in range(RANKS)]
    parts = [whole.chunk(RANKS)[rank] for whole in inputs]
    exact = torch.stack(parts).sum(0)
    output = torch.empty_like(exact)
    # A rank's own part is summed as it is; the others' are off by less than a step each.
    others = torch.stack([steps(part) for r, part in enumerate(parts) if r != rank]).sum(0)
    return Case(
        call=lambda group: dist.reduce_scatter_tensor(output, inputs[rank], group=group),
        output=output,
        exact=exact,
        bound=others + 2**-20,
    )


CASES: dict[str, Callable[[int, int], Case]] = {"all_gather": all_gather, "reduce_scatter": reduce_scatter}


def steps(values: Tensor) -> Tensor:
    """The step of each element's bucket at 8 bits: its range / 255."""
    buckets = values.view(-1, BUCKET)
    return ((buckets.amax(1) - buckets.amin(1)) / 255).repeat_interleave(BUCKET)


def summarize(ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Joins the ranks' rows: times are equal on both, bytes rank 0's, errors the worst."""
    rows = []
    gloo_s = {}
    for row, other in zip(*ranks, strict=True):
        quarter, median, three_quarters = statistics.quantiles(row["seconds"], n=4)
        if row["group"] == "gloo":
            gloo_s[row["op"], row["mib"]] = median
        moved = row["mib"] * 2**20 * (RANKS - 1) / RANKS
        summary = {
            "median_s": median,
            "spread": (three_quarters - quarter) / median,
            "bus_gb_s": moved / median / 1e9,
            "times_gloo": gloo_s[row["op"], row["mib"]] / median,
            "sent_share": row["sent_bytes"] / moved if row["sent_bytes"] else None,
            "max_error": max(row["max_error"], other["max_error"]),
            "outside": row["outside"] + other["outside"],
        }
        rows.append(row | summary)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Fixed-width rows."""
    lines = [
        f"# {'op':<15}{'MiB':>5}  {'group':<15}{'median ms':>10}{'spread %':>9}{'bus GB/s':>9}{'x gloo':>8}"
        f"{'sent MB':>9}{'sent %':>8}{'max error':>11}{'outside':>8}"
    ]
    for row in rows:
        share = row["sent_share"]
        sent = f"{row['sent_bytes'] / 1e6:>9.2f}{share * 100:>8.1f}" if share else f"{'-':>9}{'-':>8}"
        lines.append(
            f"  {row['op']:<15}{row['mib']:>5}  {row['group']:<15}{row['median_s'] * 1e3:>10.2f}"
            f"{row['spread'] * 100:>9.0f}{row['bus_gb_s']:>9.2f}{row['times_gloo']:>8.2f}{sent}"
            f"{row['max_error']:>11.2e}{row['outside']:>8}"
        )
    return "\n".join(lines)


def gates_of(rows: list[dict[str, Any]]) -> list[Gate]:
    """Every element within its bound; quantized faster than gloo's exact op at the largest size."""
    gates = [Gate("elements outside their bound, all rows", sum(row["outside"] for row in rows), "==", 0)]
    largest = max(row["mib"] for row in rows)
    for row in rows:
        if row["group"] == "lowcomm 8 bits" and row["mib"] == largest:
            gates.append(
                Gate(f"{row['op']} at 8 bits, {largest} MiB: times as fast as gloo", row["times_gloo"], ">", 1)
            )
    return gates


def main() -> int:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 16, 64], help="sizes of the whole tensor, MiB")
    parser.add_argument("--repetitions", type=int, default=15, help="at least 9")
    parser.add_argument("--json", type=Path, help="versions, machine, rows with every time, gates")
    args = parser.parse_args()
    if args.repetitions < 9 or min(args.mib) < 1:
        parser.error(f"expected --repetitions >= 9 and --mib >= 1, got {args.repetitions} and {min(args.mib)}")
    options = {"ranks": RANKS, "dtype": "float32", "repetitions": args.repetitions, "warm_up": WARM_UP, **CODECS}
    print(report.heading("collectives", **options), flush=True)
    arguments = {"mib": args.mib, "repetitions": args.repetitions}
    try:
        # gloo is in these processes too, and so are its exits.
        ranks = launch.run(measure, ranks=RANKS, deadline_s=600, plain_gloo=True, **arguments)
    except RuntimeError as error:
        raise SystemExit(f"collectives.py: {error}") from None
    rows = summarize(ranks)
    gates = gates_of(rows)
    print(table(rows))
    return report.finish(gates, args.json, {"options": options, "rows": rows})
