"""Trains a byte-level GPT under FSDP2 with 8 bits a weight and a gradient on the wire, next to the same run exact.

    torchrun --standalone --nproc-per-node 2 examples/train_fsdp.py

trains 0.82 M parameters on the sources of Python's own library twice, with equal seed and data, in about two minutes
on two cores, draws loss against bytes sent into runs/train_fsdp.png, and ends with a table like this one (Python 3.11,
torch 2.13.0, AMD EPYC, both ranks on loopback; the seconds depend on the machine, the bytes do not):

                                                    exact      quantized
    steps                                             400            400
    train loss, mean of the last 20 steps          1.7556         1.7513
    validation perplexity                           5.486          5.459   ratio 0.9950
    weights sent by a rank, MB                     1287.2          326.2    3.95× fewer
    gradients sent by a rank, MB                    656.8          166.6    3.94× fewer
    seconds                                          66.3           60.2

`--checkpoint DIR` saves; with `--resume` the run continues, and its loss is that of the run that was never interrupted.
The exact run on plain gloo: `--backend gloo --only exact`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import data
import device
import model
import plot
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from measure import mean_over_ranks, sent_bytes
from result import Result, table
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tqdm import tqdm

import torch_lowcomm as lc

CONTEXT = model.Config().context


def parse() -> argparse.Namespace:
    """Reads and checks the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], usage="%(prog)s [options]; see --help")
    parser.add_argument("--data", type=Path, help="a text file or a directory of them (default: Python's own sources)")
    parser.add_argument("--weights", default="minmax8:bucket=1024", help="codec of the all-gathers")
    parser.add_argument("--gradients", default="qsgd8:bucket=1024", help="codec of the reduce-scatters")
    parser.add_argument("--only", choices=("exact", "quantized"), help="train one of the two")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=8, help=f"windows of {CONTEXT} bytes a rank and step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="directory to save to, every --save-every steps and at the end")
    parser.add_argument("--save-every", type=int, default=200, help="steps")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint there")
    parser.add_argument("--plot", type=Path, default=Path("runs/train_fsdp.png"), help="loss against bytes (PNG)")
    parser.add_argument("--json", type=Path, help="the curves and the table's numbers, exactly")
    parser.add_argument("--backend", choices=("lowcomm", "gloo"), default="lowcomm")
    device.add_argument(parser)
    args = parser.parse_args()
    try:
        for name in ("steps", "batch", "save_every", "lr"):
            if not getattr(args, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} expects a positive number, got {getattr(args, name)}")
        if args.resume and args.checkpoint is None:
            raise ValueError("--resume expects --checkpoint DIR, got no directory")
        if args.backend == "gloo" and args.only != "exact":
            raise ValueError("--backend gloo expects --only exact, for gloo cannot quantize")
        for spec in (args.weights, args.gradients):
            lc.codec(spec)
        args.device = device.choose(args.device)
        args.corpus = data.load(args.data, context=CONTEXT).to(args.device)
        args.runs = [args.only] if args.only else ["exact", "quantized"]
        args.resume_from = {run: newest_checkpoint(args.checkpoint / run) for run in args.runs if args.resume}
        for checkpoint in args.resume_from.values():
            if int(checkpoint.name.removeprefix("step-")) >= args.steps:
                raise ValueError(f"--resume expects --steps beyond the checkpoint {checkpoint}, got {args.steps}")
        if "RANK" not in os.environ:
            raise ValueError("expected to be started by torchrun --standalone --nproc-per-node 2, got no RANK")
    except (ValueError, OSError) as error:
        # Every rank finds the same mistake; one of them says so.
        raise SystemExit(f"train_fsdp.py: {error}" if os.environ.get("RANK", "0") == "0" else 1) from None
    return args


def newest_checkpoint(directory: Path) -> Path:
    """The newest finished checkpoint in directory: DCP writes `.metadata` last."""
    finished = sorted(directory.glob("step-*/.metadata"))
    if not finished:
        raise ValueError(f"--resume expects a checkpoint in {directory}, got none")
    return finished[-1].parent


def train(args: argparse.Namespace, run: str) -> Result:
    """Trains one model from scratch or from its checkpoint and measures it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    gpt = model.GPT().to(args.device)
    mesh = init_device_mesh(args.device.type, (world,))
    for block in gpt.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(gpt, mesh=mesh)
    comms = None
    if run == "quantized":
        comms = lc.fsdp.quantize(gpt, weights=args.weights, gradients=args.gradients)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=args.lr, fused=True)

    result = Result(run if run == "exact" else f"weights {args.weights}, gradients {args.gradients}")
    if args.resume:
        result.first_step = load(args.resume_from[run], gpt, optimizer, comms=comms)
    weights_before, gradients_before = sent_bytes("all_gather"), sent_bytes("reduce_scatter")
    start = time.monotonic()
    progress = tqdm(range(result.first_step, args.steps), desc=run, disable=rank != 0, mininterval=1)
    for step in progress:
        loss = gpt(*args.corpus.batch(args.batch, CONTEXT, seed=args.seed, step=step, rank=rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        result.weights_bytes = sent_bytes("all_gather") - weights_before
        result.gradients_bytes = sent_bytes("reduce_scatter") - gradients_before
        result.loss.append(mean_over_ranks(loss))
        result.sent_bytes.append(result.weights_bytes + result.gradients_bytes)
        progress.set_postfix(loss=f"{result.loss[-1]:.3f}", MB=f"{result.sent_bytes[-1] / 1e6:.0f}", refresh=False)
        if args.checkpoint and ((step + 1) % args.save_every == 0 or step + 1 == args.steps):
            save(args.checkpoint / run / f"step-{step + 1:08d}", gpt, optimizer, step=step + 1, comms=comms)
    result.seconds = time.monotonic() - start
    with torch.no_grad():
        batches = [args.corpus.validation_batch(32, CONTEXT, i * world + rank) for i in range(16)]
        result.perplexity = math.exp(mean_over_ranks(torch.stack([gpt(*batch) for batch in batches]).mean()))
    return result


def save(directory: Path, gpt: model.GPT, optimizer: torch.optim.Optimizer, *, step: int, comms: Any) -> None:
    """Every rank writes its own shards; `comms` is what `lc.fsdp.quantize` returned, None in an exact run."""
    weights, moments = get_state_dict(gpt, optimizer)
    state = {"model": weights, "optimizer": moments, "step": step} | ({"comms": comms} if comms else {})
    dcp.save(state, checkpoint_id=directory)


def load(directory: Path, gpt: model.GPT, optimizer: torch.optim.Optimizer, *, comms: Any) -> int:
    """Restores model, optimizer and comms in place; returns the number of steps done."""
    weights, moments = get_state_dict(gpt, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 0} | ({"comms": comms} if comms else {})
    dcp.load(state, checkpoint_id=directory)
    set_state_dict(gpt, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["step"]


def main() -> None:
    """Trains once or twice and reports on rank 0."""
    args = parse()
    torch.set_num_threads(1)
    dist.init_process_group(args.backend)
    results = [train(args, run) for run in args.runs]
    if dist.get_rank() == 0:
        print("\n" + table(results))
        if args.backend == "lowcomm":  # gloo counts no bytes
            title = f"{args.steps} steps of FSDP2, {dist.get_world_size()} ranks"
            plot.loss_against_bytes(results, args.plot, title=title)
            print(f"loss against bytes: {args.plot}")
        print(lc.summary())
        if args.json:
            args.json.write_text(json.dumps([dataclasses.asdict(result) for result in results]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
