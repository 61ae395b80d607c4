"""A step of lc.SubspaceAdamW against torch's fused AdamW on the same parameters, in turn.

    python benchmarks subspace_adam [--width 1024] [--rank 64] [--tokens 8192] [--batch 4096] [--threads N] [--repetitions 41]
        [--json FILE]

A middle stage is a block: attention, norms, feed-forward of 4·width. The last stage has a head [tokens, width] too, the first one
a trained embedding of that shape, whose gradient has rows for the tokens of a batch, drawn by Zipf's law; "first, all tokens" has
them all. "weights": constrained ones; "coordinates": after `lc.subspace.reparam`, with the same rules;
"its products alone": the matrix products that a step with weights makes, two of W_p2 and four of W_p1 and T_S, two of which
have the batch's rows alone. A ratio is the
median over repetitions of a step's time by AdamW's in the same repetition; "of least" compares the shortest times, which other
load on the machine spoils least. No gate asks for a gradient of all tokens: the elementwise moments of T_S then need two products
of all rows with U in either form.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import report
import torch
from torch import nn

import torch_lowcomm as lc
from torch_lowcomm import _C
from torch_lowcomm.subspace.basis import Basis
from torch_lowcomm.subspace.weights import constrained_weights

PARTS = ("middle", "last", "first", "first, all tokens")
TILE = 128  # rows of T_S in a product: the step's, whose results stay in the cache


def parse() -> argparse.Namespace:
    """The command line."""
    parser = report.arguments(__doc__, repetitions=41)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8192, help="the vocabulary")
    parser.add_argument("--batch", type=int, default=4096, help="tokens of a step")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def stage(part: str, basis: Basis, tokens: int) -> nn.Module:
    """The parameters of a block, of a first stage with the trained embedding too, or of a last one with a head."""
    width = basis.width
    module = nn.Module()
    module.qkv, module.up = nn.Linear(width, 3 * width), nn.Linear(width, 4 * width)
    module.out, module.down = nn.Linear(width, width, bias=False), nn.Linear(4 * width, width, bias=False)
    module.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
    roles = {"out": "attention_output", "down": "feed_forward_down"}
    if part.startswith("first"):
        module.embedding = nn.Embedding(tokens, width)
        roles["embedding"] = "embedding"
    if part == "last":
        module.head = nn.Linear(width, tokens, bias=False)
    for name, role in roles.items():
        holder = module.get_submodule(name)
        object.__setattr__(holder, "subspace_role", role)
        object.__setattr__(holder, "subspace_basis", basis)
        with torch.no_grad():
            rows = role == "embedding"
            holder.weight.copy_(basis.project(holder.weight) if rows else basis.project_weight(holder.weight))
    return module


def gradients(module: nn.Module, part: str, args: argparse.Namespace) -> int:
    """Draws gradients; of the embedding for the tokens of a batch alone, where the part says so. Returns how many tokens."""
    for p in module.parameters():
        p.grad = torch.randn_like(p)
    if part != "first":
        return args.tokens
    draws = torch.multinomial(1 / torch.arange(1.0, args.tokens + 1), args.batch, replacement=True)
    absent = torch.ones(args.tokens, dtype=torch.bool).index_fill(0, draws, False)
    for p in module.embedding.parameters():
        p.grad[absent] = 0
    return args.tokens - int(absent.sum())


def products(module: nn.Module, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[], None]:
    """The matrix products that a step with whole weights cannot do without: two of W_p2, four of W_p1 and T_S."""
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    for weight in constrained_weights(module):
        u, g = weight.basis.rows(torch.float32), weight.parameter.grad
        c = weight.coordinates(g)
        if weight.axis == 0:
            calls += [(u, g), (u.T, c)] * (1 if weight.role == "feed_forward_down" else 2)
            continue
        there = g.any(1)
        for rows, coordinates in ((g[there], c[there]), (g, c)):
            calls += [(part, u.T) for part in rows.split(TILE)] + [(part, u) for part in coordinates.split(TILE)]

    def run() -> None:
        for a, b in calls:
            product(a, b)

    return run


def measure(part: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Medians of all ways to make a step, taken in turn."""
    basis = Basis(args.width, args.rank)
    whole = stage(part, basis, args.tokens)
    ways: dict[str, Callable[[], Any]] = {}
    for name in ("AdamW", "weights", "weights, all projected", "coordinates"):
        module = copy.deepcopy(whole)
        if name == "coordinates":
            lc.subspace.reparam(module)
        if name == "AdamW":
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        else:
            variant = "project_all" if "all" in name else "rows"
            optimizer = lc.SubspaceAdamW(module, variant=variant, check_every=0)
        gradients(module, "first, all tokens", args)
        optimizer.step()  # all tokens have moments, as in training
        tokens = gradients(module, part, args)
        if name == "AdamW":
            ways["its products alone, torch.mm"] = products(module, torch.mm)
            ways["its products alone"] = products(module, _C.product)
        ways[name] = optimizer.step
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repetition in range(-3, args.repetitions):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if repetition >= 0:
                seconds[name].append(time.perf_counter() - start)
    rows = []
    for name, taken in seconds.items():
        quarter, median, three_quarters = statistics.quantiles(taken, n=4)
        ratios = [mine / theirs for mine, theirs in zip(taken, seconds["AdamW"], strict=True)]
        rows.append(
            {
                "stage": part,
                "step": name,
                "tokens": tokens,
                "median_s": median,
                "least_s": min(taken),
                "spread": (three_quarters - quarter) / median,
                "ratio": statistics.median(ratios),
                "ratio_of_least": min(taken) / min(seconds["AdamW"]),
            }
        )
    return rows


def main() -> int:
    """Measures and reports."""
    args = parse()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    options = {"width": args.width, "rank": args.rank, "tokens": args.tokens, "threads": args.threads}
    options["batch"] = args.batch
    print(report.heading("subspace_adam", **options, repetitions=args.repetitions))
    print(f"# {'stage':<18} {'step of':<29} {'median ms':>10} {'spread %':>9} {'x AdamW':>8} {'of least':>9}")
    rows = [row for part in PARTS for row in measure(part, args)]
    for row in rows:
        print(
            f"  {row['stage']:<18} {row['step']:<29} {row['median_s'] * 1e3:>10.2f} {row['spread'] * 100:>9.0f}"
            f" {row['ratio']:>8.2f} {row['ratio_of_least']:>9.2f}"
        )
    by_name = {(row["stage"], row["step"]): row for row in rows}
    gates = [
        report.Gate(f"coordinates / AdamW, {part} stage", by_name[part, "coordinates"]["ratio"], "<=", 1.25)
        for part in ("middle", "last")
    ]
    gates.append(report.Gate("coordinates / AdamW, first stage", by_name["first", "coordinates"]["ratio"], "<=", 1.5))
    for part in ("middle", "first"):
        bound = sum(by_name[part, name]["median_s"] for name in ("AdamW", "its products alone"))
        ratio = by_name[part, "weights"]["median_s"] / bound
        gates.append(report.Gate(f"weights / (AdamW + the products alone), {part} stage", ratio, "<=", 1.25))
    return report.finish(gates, args.json, {**options, "rows": rows})
