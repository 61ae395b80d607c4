"""Trains a byte-level GPT in a pipeline whose boundaries carry few numbers a token, next to the free model over exact messages.

    torchrun --standalone --nproc-per-node 2 examples/train_subspace.py

trains 0.82 M parameters on the sources of Python's own library, one stage a process, twice from the same weights: the free
model, all of whose 128 numbers a token cross the boundary, and a model that `lc.subspace.constrain` has put into a subspace of
32 dimensions, of which 32 numbers cross it and nothing is lost on the way. Two minutes on two cores; it draws loss against bytes
sent into runs/train_subspace.png, and ends with a table like this one (Python 3.11, torch 2.13.0, AMD EPYC, both ranks on
loopback; the seconds depend on the machine, the bytes do not):

                                    free, exact messages    constrained, 32 x fp32
    train loss, last 20 steps                     1.7701                    1.8248
    validation perplexity                          5.811                     6.306
    bytes a token, last stage                      513.1                     129.4
    fewer bytes, times                               1.0                       4.0
    seconds                                         36.3                      40.1

Then its stages generate a line of text together (`lc.subspace.generate`). `--kind coded` sends codes of all numbers of the
free model (`--coefficients gauss4`, say). Which one is nearest to the free model at equal bytes depends on the ratio:
docs/subspace.md. Perplexity is by exact messages in every case.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import time
from pathlib import Path

import data
import device
import model
import plot
import torch
import torch.distributed as dist
from measure import sent_in_messages
from stages import Part, loss_of
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from tqdm import tqdm

import torch_lowcomm as lc

CONFIG = model.Config()
SCHEDULES = {"1f1b": Schedule1F1B, "1f1b-ahead": lc.pipeline.Schedule1F1B, "gpipe": ScheduleGPipe}
KINDS = ("constrained", "coded")


@dataclasses.dataclass
class Result(plot.Curve):
    """The result of one run: its curve and the columns of the final table."""

    seconds: float = math.nan
    perplexity: float = math.nan
    token_bytes: float = math.nan  # that the last stage has sent for each token
    text: str = ""  # a beginning that no run has seen, and what the stages make of it


def parse() -> argparse.Namespace:
    """Reads and checks the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], usage="%(prog)s [options]; see --help")
    parser.add_argument("--data", type=Path, help="a text file or a directory of them (default: Python's own sources)")
    parser.add_argument("--rank", type=int, default=32, help=f"numbers a token of {CONFIG.width}")
    parser.add_argument(
        "--coefficients",
        default="fp32",
        metavar="fp32|bf16|CODEC",
        help="what a number travels as; only fp32 is exact. --kind coded needs a codec",
    )
    parser.add_argument("--kind", choices=KINDS, default="constrained")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help=f"windows of {CONFIG.context} bytes a step")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=Path("runs/train_subspace.png"), help="loss against bytes")
    parser.add_argument("--json", type=Path, help="the curves and the table's numbers, exactly")
    device.add_argument(parser)
    args = parser.parse_args()
    try:
        for name in ("micro_batches", "batch", "steps", "lr"):
            if not getattr(args, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} expects a positive number, got {getattr(args, name)}")
        if not 1 <= args.rank <= CONFIG.width:
            raise ValueError(f"--rank expects 1...{CONFIG.width}, the model's width, got {args.rank}")
        if args.batch % args.micro_batches:
            raise ValueError(
                f"--batch expects a multiple of --micro-batches, got {args.batch} and {args.micro_batches}"
            )
        if args.coefficients not in ("fp32", "bf16"):
            lc.codec(args.coefficients)
        elif args.kind == "coded":
            raise ValueError(f"--kind coded expects --coefficients CODEC, got {args.coefficients}")
        args.device = device.choose(args.device)
        args.corpus = data.load(args.data, context=CONFIG.context)
        if "RANK" not in os.environ:
            raise ValueError("expected to be started by torchrun --standalone --nproc-per-node 2, got no RANK")
    except (ValueError, OSError) as error:
        # Every rank finds the same mistake; one of them says so.
        raise SystemExit(f"train_subspace.py: {error}" if os.environ.get("RANK", "0") == "0" else 1) from None
    return args


def stage_of(args: argparse.Namespace, *, free: bool) -> tuple[lc.pipeline.Stage, torch.optim.Optimizer, str]:
    """This rank's stage of a run, its optimizer, and the run's name."""
    index, count = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    gpt = model.GPT().to(args.device)
    nn.init.normal_(gpt.embed.weight, std=0.1)
    options: dict[str, str] = {}
    if free or args.kind == "coded":
        part: nn.Module = Part(gpt, index, count)
        options = {} if free else {"forward": args.coefficients, "backward": args.coefficients}
        name = "free, exact messages" if free else f"free, {args.coefficients} of all numbers"
    else:
        gpt = lc.subspace.constrain(gpt, args.rank, seed=args.seed)
        part = lc.subspace.cut(gpt, index, count, coefficients=args.coefficients)
        name = f"constrained, {args.rank} x {args.coefficients}"
    stage = lc.pipeline.Stage(part, index, count, args.device, **options)
    if free or args.kind != "constrained":
        return stage, torch.optim.AdamW(part.parameters(), lr=args.lr), name
    return stage, lc.SubspaceAdamW(part, lr=args.lr), name


def train(args: argparse.Namespace, *, free: bool) -> Result:
    """Trains one pipeline and measures it. Losses and perplexity are known to the last stage."""
    stage, optimizer, name = stage_of(args, free=free)
    schedule = SCHEDULES[args.schedule](stage, n_microbatches=args.micro_batches, loss_fn=loss_of)
    result = Result(name)
    before, start = sent_in_messages(), time.monotonic()
    progress = tqdm(range(args.steps), desc=name, disable=not stage.is_last, mininterval=1)
    for step in progress:
        x, y = args.corpus.batch(args.batch, CONFIG.context, seed=args.seed, step=step, rank=0)
        x, y = x.to(args.device), y.to(args.device)
        losses: list[Tensor] = []
        lc.pipeline.step(schedule, x, target=y, losses=losses, ids=x)
        optimizer.step()
        optimizer.zero_grad()
        result.loss.append(torch.stack(losses).mean().item() if losses else math.nan)
        result.sent_bytes.append(sent_in_messages() - before)
        progress.set_postfix(loss=f"{result.loss[-1]:.3f}", MB=f"{result.sent_bytes[-1] / 1e6:.1f}", refresh=False)
    result.seconds = time.monotonic() - start
    result.token_bytes = result.sent_bytes[-1] / (args.steps * args.batch * CONFIG.context)
    result.perplexity = perplexity(args, schedule)
    if not free and args.kind != "coded":
        result.text = continued(args, stage)
    return result


def perplexity(args: argparse.Namespace, schedule: Schedule1F1B) -> float:
    """On text that no run has seen; known to the last stage."""
    losses: list[Tensor] = []
    for i in range(8):
        x, y = (t.to(args.device) for t in args.corpus.validation_batch(args.batch, CONFIG.context, i))
        of_batch: list[Tensor] = []  # torch empties the list at each call
        lc.pipeline.evaluate(schedule, x, target=y, losses=of_batch, ids=x)
        losses += of_batch
    return math.exp(torch.stack(losses).mean().item()) if losses else math.nan


def continued(args: argparse.Namespace, stage: lc.pipeline.Stage) -> str:
    """Text that the stages generate together, a message a token and boundary."""
    x, _ = args.corpus.validation_batch(1, CONFIG.context, 0)
    ids = lc.subspace.generate(stage, x[:, :24].to(args.device), max_new_tokens=40, temperature=0.7, seed=args.seed)
    return bytes(ids[0].tolist()).decode("ascii")


def table(results: list[Result]) -> str:
    """A column a run."""
    free = results[0]
    rows = {
        "": [r.label for r in results],
        "train loss, last 20 steps": [f"{sum(r.loss[-20:]) / len(r.loss[-20:]):.4f}" for r in results],
        "validation perplexity": [f"{r.perplexity:.3f}" for r in results],
        "bytes a token, last stage": [f"{r.token_bytes:.1f}" for r in results],
        "fewer bytes, times": [f"{free.token_bytes / r.token_bytes:.1f}" for r in results],
        "seconds": [f"{r.seconds:.1f}" for r in results],
    }
    width = max(24, 4 + max(len(r.label) for r in results))
    return "\n".join(f"{name:<28}" + "".join(f"{cell:>{width}}" for cell in cells) for name, cells in rows.items())


def main() -> None:
    """Trains twice and reports on the last rank."""
    args = parse()
    torch.set_num_threads(1)
    dist.init_process_group("lowcomm")
    if not 2 <= dist.get_world_size() <= CONFIG.layers:
        raise SystemExit(f"train_subspace.py: expected 2 to {CONFIG.layers} processes, got {dist.get_world_size()}")
    results = [train(args, free=free) for free in (True, False)]
    if dist.get_rank() == dist.get_world_size() - 1:
        print("\n" + table(results))
        if results[1].text:
            print(f"generated by the stages: {results[1].text!r}")
        plot.loss_against_bytes(results, args.plot, title=f"{dist.get_world_size()} stages, {args.steps} steps")
        print(f"loss against bytes: {args.plot}")
        print(lc.summary())
        if args.json:
            args.json.write_text(json.dumps([dataclasses.asdict(result) for result in results]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
