"""Trains a byte-level GPT under DDP with 4 bits a gradient, or two coded factors of a low rank, next to the same run exact.

    torchrun --standalone --nproc-per-node 2 examples/train_ddp.py

trains 0.82 M parameters on the sources of Python's own library three times, with equal seed and data, in about three minutes
on two cores, draws loss against bytes sent into runs/train_ddp.png, and ends with a table like this one (Python 3.11, torch
2.13.0, Intel Xeon, both ranks on loopback; the seconds depend on the machine, the bytes do not):

                                                              exact      sym4:bucket=128        rank 8, sym8/sym4
    steps                                                       400                  400                      400
    train loss, mean of the last 20 steps                    1.7556               1.7552                   1.8246
    validation perplexity                                     5.486                5.532                    5.965
    sent by a rank, MB                                      1312.56               176.21                    25.65
    fewer bytes, times                                          1.0                  7.4                     51.2
    seconds                                                    68.7                 66.3                     52.8

`--checkpoint DIR` saves; with `--resume` the run continues, and its loss is that of the run that was never interrupted.
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
from measure import mean_over_ranks, reduced_bytes
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import torch_lowcomm as lc

CONTEXT = model.Config().context
RUNS = ("exact", "coded", "low rank")


@dataclasses.dataclass
class Result(plot.Curve):
    """The result of one run: its curve and the columns of the final table."""

    first_step: int = 0
    perplexity: float = math.nan
    seconds: float = 0.0


def parse() -> argparse.Namespace:
    """Reads and checks the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], usage="%(prog)s [options]; see --help")
    parser.add_argument("--data", type=Path, help="a text file or a directory of them (default: Python's own sources)")
    parser.add_argument("--codec", default="sym4:bucket=128", help="of gradients, and of second factors")
    parser.add_argument("--projection-codec", default="sym8:bucket=128", help="of first factors")
    parser.add_argument("--rank", type=int, default=8, help="of the factors")
    parser.add_argument("--only", choices=RUNS, help="train one of the three")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=8, help=f"windows of {CONTEXT} bytes a rank and step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="directory to save to at the end")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint there")
    parser.add_argument("--plot", type=Path, default=Path("runs/train_ddp.png"), help="loss against bytes (PNG)")
    parser.add_argument("--json", type=Path, help="the curves and the table's numbers, exactly")
    device.add_argument(parser)
    args = parser.parse_args()
    try:
        for name in ("steps", "batch", "lr", "rank"):
            if not getattr(args, name) > 0:
                raise ValueError(f"--{name} expects a positive number, got {getattr(args, name)}")
        if args.resume and args.checkpoint is None:
            raise ValueError("--resume expects --checkpoint DIR, got no directory")
        lc.codec(args.codec)
        lc.codec(args.projection_codec)
        args.device = device.choose(args.device)
        args.corpus = data.load(args.data, context=CONTEXT).to(args.device)
        args.runs = [args.only] if args.only else RUNS
        missing = [run for run in args.runs if args.resume and not checkpoint_of(args, run).exists()]
        if missing:
            raise ValueError(f"--resume expects {checkpoint_of(args, missing[0])}, found none")
        if "RANK" not in os.environ:
            raise ValueError("expected to be started by torchrun --standalone --nproc-per-node 2, got no RANK")
    except (ValueError, OSError) as error:
        # Every rank finds the same mistake; one of them says so.
        raise SystemExit(f"train_ddp.py: {error}" if os.environ.get("RANK", "0") == "0" else 1) from None
    return args


def checkpoint_of(args: argparse.Namespace, run: str) -> Path:
    """A file a rank: residuals are the rank's own."""
    return args.checkpoint / run.replace(" ", "-") / f"rank{os.environ.get('RANK', '0')}.pt"


def hooked(gpt: model.GPT, args: argparse.Namespace, run: str) -> tuple[DistributedDataParallel, lc.ddp.State | None]:
    """The model under DDP and, unless the run is exact, the state of its hook."""
    # One bucket: with a rank each takes two round trips, whatever little it sends.
    ddp = DistributedDataParallel(gpt, bucket_cap_mb=100)
    if run == "exact":
        return ddp, None
    factors = {"rank": args.rank, "projection_codec": args.projection_codec} if run == "low rank" else {}
    state = lc.ddp.State(codec=args.codec, model=gpt, **factors)
    ddp.register_comm_hook(state, lc.ddp.hook)
    return ddp, state


def train(args: argparse.Namespace, run: str) -> Result:
    """Trains one model from scratch or from its checkpoint and measures it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    gpt = model.GPT().to(args.device)
    ddp, state = hooked(gpt, args, run)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=args.lr, fused=True)
    low_rank = f"rank {args.rank}, {'/'.join(c.partition(':')[0] for c in (args.projection_codec, args.codec))}"
    label = {"exact": "exact", "coded": args.codec, "low rank": low_rank}[run]
    result = Result(label)
    file = checkpoint_of(args, run) if args.checkpoint else None
    if args.resume:
        saved = torch.load(file, map_location=args.device)
        gpt.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if state is not None:
            state.load_state_dict(saved["ddp"])
        result.first_step = saved["step"]
    before = reduced_bytes()
    start = time.monotonic()
    progress = tqdm(range(result.first_step, args.steps), desc=run, disable=rank != 0, mininterval=1)
    for step in progress:
        loss = ddp(*args.corpus.batch(args.batch, CONTEXT, seed=args.seed, step=step, rank=rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        result.sent_bytes.append(reduced_bytes() - before)
        result.loss.append(mean_over_ranks(loss))
        progress.set_postfix(loss=f"{result.loss[-1]:.3f}", MB=f"{result.sent_bytes[-1] / 1e6:.1f}", refresh=False)
    result.seconds = time.monotonic() - start
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        saved = {"model": gpt.state_dict(), "optimizer": optimizer.state_dict(), "step": args.steps}
        torch.save(saved | ({"ddp": state.state_dict()} if state is not None else {}), file)
    with torch.no_grad():
        batches = [args.corpus.validation_batch(32, CONTEXT, i * world + rank) for i in range(16)]
        result.perplexity = math.exp(mean_over_ranks(torch.stack([gpt(*batch) for batch in batches]).mean()))
    return result


def table(results: list[Result]) -> str:
    """A column a run."""
    exact = results[0] if results[0].label == "exact" else None
    rows = {
        "": [r.label for r in results],
        "steps": [f"{r.first_step}+{len(r.loss)}" if r.first_step else f"{len(r.loss)}" for r in results],
        "train loss, mean of the last 20 steps": [f"{sum(r.loss[-20:]) / len(r.loss[-20:]):.4f}" for r in results],
        "validation perplexity": [f"{r.perplexity:.3f}" for r in results],
        "sent by a rank, MB": [f"{r.sent_bytes[-1] / 1e6:.2f}" for r in results],
        "fewer bytes, times": [
            f"{exact.sent_bytes[-1] / r.sent_bytes[-1]:.1f}" if exact and r.sent_bytes[-1] else "-" for r in results
        ],
        "seconds": [f"{r.seconds:.1f}" for r in results],
    }
    return "\n".join(f"{name:<38}" + "".join(f"{cell:>25}" for cell in cells) for name, cells in rows.items())


def main() -> None:
    """Trains once or three times and reports on rank 0."""
    args = parse()
    torch.set_num_threads(1)
    dist.init_process_group("lowcomm")
    results = [train(args, run) for run in args.runs]
    if dist.get_rank() == 0:
        print("\n" + table(results))
        plot.loss_against_bytes(results, args.plot, title=f"{args.steps} steps of DDP, {dist.get_world_size()} ranks")
        print(f"loss against bytes: {args.plot}")
        print(lc.summary())
        if args.json:
            args.json.write_text(json.dumps([dataclasses.asdict(result) for result in results]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
