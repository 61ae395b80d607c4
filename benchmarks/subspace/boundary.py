"""The two sides of a subspace boundary, forward and backward, next to their matrix products and to a block; and their memory.

    python benchmarks subspace_boundary [--quick] [--threads 1 2] [--repetitions 9] [--json FILE]

"boundary": `Encode`, `Decode` and their gradients through autograd, on 4,096 tokens of 1,024 numbers; signs are made in it.
"products": x·U, c·Uᵀ and the gradients of both by torch alone. "block": forward and backward of one block of a GPT on the same
tokens, 8 sequences of 512. A turn of the block is followed by some of the others, in turn; ratios are of neighbours in time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model
import report
import torch

import torch_lowcomm as lc
from subspace import held
from torch_lowcomm.subspace.anchor import Anchor
from torch_lowcomm.subspace.boundary import Decode, Encode

WIDTH, TOKENS, CONTEXT, VOCABULARY = 1024, 4096, 512, 50_304
RANKS = (64, 16)
TURNS = 5  # of boundary and products, after a turn of the block
PRODUCTS, BLOCK = 0.70, 0.04


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="an eighth of the tokens, twice; four sizes of memory")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repetitions", type=int, default=9, help="turns of the block")
    parser.add_argument("--json", type=Path, help="versions, machine, rows, gates")
    args = parser.parse_args()
    if min(*args.threads, args.repetitions, 1) < 1:
        parser.error(f"expected positive numbers, got --threads {args.threads} --repetitions {args.repetitions}")
    return args


def ways(rank: int, tokens: int) -> dict[str, Callable[[], Any]]:
    """The boundary and its products alone, each on tensors of its own."""
    basis, anchor = lc.subspace.Basis(WIDTH, rank), Anchor(VOCABULARY, WIDTH)
    encode, decode, u = Encode(basis, anchor), Decode(basis, anchor), basis.rows(torch.float32)
    ids = torch.randint(VOCABULARY, (tokens // CONTEXT, CONTEXT))
    x = torch.randn(*ids.shape, WIDTH, requires_grad=True)
    gradient = torch.randn_like(x)
    return {
        "boundary": lambda: torch.autograd.grad(decode(encode(x, ids), ids), x, gradient),
        "products": lambda: torch.autograd.grad((x @ u.t()) @ u, x, gradient),
    }


def block(tokens: int) -> Callable[[], Any]:
    """Forward and backward of a block, its weights' gradients too."""
    made = model.Block(model.Config(width=WIDTH, heads=16, context=CONTEXT))
    x = torch.randn(tokens // CONTEXT, CONTEXT, WIDTH, requires_grad=True)
    gradient, wanted = torch.randn_like(x), [x, *made.parameters()]
    return lambda: torch.autograd.grad(made(x), wanted, gradient)


def timed(way: Callable[[], Any]) -> float:
    """Seconds."""
    start = time.perf_counter()
    way()
    return time.perf_counter() - start


def measure(threads: int, *, tokens: int, repetitions: int) -> list[dict[str, Any]]:
    """A row a rank: medians, quartiles' distance by the median, and medians of ratios within a turn."""
    torch.set_num_threads(threads)
    of_rank, whole = {rank: ways(rank, tokens) for rank in RANKS}, block(tokens)
    taken: dict[Any, list[float]] = {(rank, name): [] for rank in RANKS for name in of_rank[rank]}
    blocks: list[float] = []
    for repetition in range(-1, repetitions):
        seconds = timed(whole)
        blocks += [seconds] * (repetition >= 0)
        for _ in range(TURNS):
            for (rank, name), times in taken.items():
                seconds = timed(of_rank[rank][name])
                times += [seconds] * (repetition >= 0)
    rows = []
    for rank in RANKS:
        boundary, products = taken[rank, "boundary"], taken[rank, "products"]
        after = [s for s in blocks for _ in range(TURNS)]
        rows.append(
            {
                "threads": threads,
                "rank": rank,
                **{
                    f"{name}_s": statistics.median(times)
                    for name, times in (("boundary", boundary), ("products", products))
                },
                "block_s": statistics.median(blocks),
                "spread": spread(boundary),
                "block_spread": spread(blocks),
                "products_share": statistics.median(p / b for p, b in zip(products, boundary, strict=True)),
                "block_share": statistics.median(b / s for b, s in zip(boundary, after, strict=True)),
            }
        )
    return rows


def spread(seconds: list[float]) -> float:
    """Distance of the quartiles by the median."""
    quarter, median, three_quarters = statistics.quantiles(seconds, n=4)
    return (three_quarters - quarter) / median


def show(rows: list[dict[str, Any]]) -> None:
    """A line a row."""
    print(
        f"# {'threads':<9}{'k':>4}{'boundary ms':>13}{'spread %':>10}{'products ms':>13}{'products / boundary':>21}",
        end="",
    )
    print(f"{'block ms':>10}{'spread %':>10}{'boundary / block':>18}")
    for row in rows:
        print(
            f"  {row['threads']:<9}{row['rank']:>4}{row['boundary_s'] * 1e3:>13.2f}{row['spread'] * 100:>10.1f}"
            f"{row['products_s'] * 1e3:>13.2f}{row['products_share']:>21.3f}{row['block_s'] * 1e3:>10.1f}"
            f"{row['block_spread'] * 100:>10.1f}{row['block_share']:>18.4f}"
        )


def show_held(rows: list[dict[str, Any]]) -> None:
    """A line a stage."""
    print(f"# bytes that a stage holds beyond its decoder, d = {held.WIDTH}, k = {held.RANK}, contexts by vocabularies")
    print(
        f"# {'stage':<8}{'Grassmann':<11}{'sizes':>6}{'least':>10}{'most':>10}{'formula':>10}{'autograd, without U':>21}"
    )
    for row in rows:
        print(
            f"  {row['stage']:<8}{'yes' if row['turning'] else 'no':<11}{row['sizes']:>6}{row['least_bytes']:>10}"
            f"{row['most_bytes']:>10}{row['expected_bytes']:>10}{row['autograd_bytes']:>21}"
        )


def gates(rows: list[dict[str, Any]], memory: list[dict[str, Any]]) -> list[report.Gate]:
    """Of times, and of memory."""
    found = []
    for row in rows:
        name = f"{row['threads']} threads, k = {row['rank']}"
        found.append(report.Gate(f"{name}: products / boundary", row["products_share"], ">=", PRODUCTS))
        found.append(report.Gate(f"{name}: boundary / block", row["block_share"], "<=", BLOCK))
    grown = max(row["most_bytes"] - row["least_bytes"] for row in memory)
    off = max(abs(row["most_bytes"] - row["expected_bytes"]) for row in memory)
    saved = max(row["autograd_bytes"] for row in memory)
    return [
        *found,
        report.Gate("bytes by which a stage grows with context and vocabulary", grown, "==", 0),
        report.Gate("a stage's bytes less those of U, and of S where it turns", off, "==", 0),
        report.Gate("bytes that autograd keeps for a boundary, without U", saved, "==", 0),
    ]


def main() -> int:
    """Measures and reports."""
    args = parse()
    torch.manual_seed(0)
    tokens, repetitions = (CONTEXT, 2) if args.quick else (TOKENS, args.repetitions)
    options = {"width": WIDTH, "tokens": tokens, "context": CONTEXT, "repetitions": repetitions, "quick": args.quick}
    print(report.heading("subspace_boundary", **options))
    rows = [row for threads in args.threads for row in measure(threads, tokens=tokens, repetitions=repetitions)]
    show(rows)
    torch.set_num_threads(1)
    memory = held.measure(quick=args.quick)
    show_held(memory)
    return report.finish(gates(rows, memory), args.json, {**options, "rows": rows, "memory": memory})
