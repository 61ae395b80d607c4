"""Fine-tunes a byte-level GPT cut into stages whose activations travel as changes, next to the same run exact.

    torchrun --standalone --nproc-per-node 2 examples/train_pipeline.py

trains 0.82 M parameters on 128 windows of the sources of Python's own library, several times over, in a pipeline of one stage a
process: once with exact messages and once with `lc.pipeline.Stage(forward=…, backward=…, cache=…)`. Both begin with the model
that some steps on one process have made. A minute on two cores; it draws loss against bytes sent into
runs/train_pipeline.png, and ends with a table like this one (Python 3.11, torch 2.13.0, AMD EPYC, both ranks on loopback; the
seconds depend on the machine, the bytes do not; perplexity is by exact messages):

                                                             exact    gauss2 changes, gauss4 gradients
    train loss, first epoch                                     1.9672                              1.9672
    train loss, last epoch                                      1.5922                              1.5966
    validation perplexity                                        6.988                               6.997
    sent by the last stage, MB                                   33.62                                4.40
    fewer bytes, times                                             1.0                                 7.6
    cache of the last stage, MB                                    0.0                                 2.1
    seconds                                                        3.5                                 3.7

Several replicas of the pipeline share the samples, and average each stage: gradients, exactly or by `lc.QuantizedAdam`, or every
few steps the parameters, by `lc.DiLoCoX`. Then every message between processes is coded, but in QuantizedAdam's warm-up:

    torchrun --standalone --nproc-per-node 4 examples/train_pipeline.py --replicas 2 --optimizer quantized_adam
"""

from __future__ import annotations

import argparse
import copy
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
from measure import reduced_bytes, sent_bytes, sent_in_messages
from stages import Part, loss_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from tqdm import tqdm

import torch_lowcomm as lc

CONFIG = model.Config()
SCHEDULES = {"1f1b": Schedule1F1B, "1f1b-ahead": lc.pipeline.Schedule1F1B, "gpipe": ScheduleGPipe}


@dataclasses.dataclass
class Result(plot.Curve):
    """The result of one run: its curve and the columns of the final table."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    perplexity: float = math.nan
    cache_bytes: int = 0


def parse() -> argparse.Namespace:
    """Reads and checks the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], usage="%(prog)s [options]; see --help")
    parser.add_argument("--data", type=Path, help="a text file or a directory of them (default: Python's own sources)")
    parser.add_argument("--forward", default="gauss2", help="codec of activations' changes")
    parser.add_argument("--backward", default="gauss4", help="codec of gradients")
    parser.add_argument(
        "--first-visit", default="minmax8:bucket=128", help="codec of a sample's first visit; none: exact"
    )
    parser.add_argument(
        "--cache",
        default="ram",
        metavar="ram|FOLDER|none",
        help="where samples are remembered; files are found again by the next run. none: no changes, activations coded",
    )
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--samples", type=int, default=128, help=f"windows of {CONFIG.context} bytes")
    parser.add_argument("--batch", type=int, default=16, help="samples a step")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--pretrain", type=int, default=200, help="steps of the whole model on each process, before")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument(
        "--replicas", type=int, default=1, help="pipelines that share the samples and average each stage"
    )
    parser.add_argument(
        "--optimizer",
        choices=("adamw", "quantized_adam", "diloco"),
        default="adamw",
        help="of the coded run's replicas; adamw averages gradients exactly",
    )
    parser.add_argument("--sync-every", type=int, default=8, help="diloco: steps between averages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=Path("runs/train_pipeline.png"), help="loss against bytes")
    parser.add_argument("--json", type=Path, help="the curves and the table's numbers, exactly")
    device.add_argument(parser)
    args = parser.parse_args()
    try:
        for name in ("micro_batches", "samples", "batch", "epochs", "pretrain", "lr", "replicas", "sync_every"):
            if not getattr(args, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} expects a positive number, got {getattr(args, name)}")
        if args.batch % args.micro_batches:
            raise ValueError(
                f"--batch expects a multiple of --micro-batches, got {args.batch} and {args.micro_batches}"
            )
        if args.optimizer != "adamw" and args.replicas == 1:
            raise ValueError(f"--optimizer {args.optimizer} expects --replicas 2 or more, got 1")
        if args.samples < args.replicas * args.batch:
            raise ValueError(
                f"--samples expects a batch of {args.batch} for each of {args.replicas} replicas, got {args.samples}"
            )
        args.first_visit = None if args.first_visit == "none" else args.first_visit
        for codec in (args.forward, args.backward, args.first_visit or "none"):
            lc.codec(codec)
        args.device = device.choose(args.device)
        args.corpus = data.load(args.data, context=CONFIG.context)
        if "RANK" not in os.environ:
            raise ValueError("expected to be started by torchrun --standalone --nproc-per-node 2, got no RANK")
    except (ValueError, OSError) as error:
        # Every rank finds the same mistake; one of them says so.
        raise SystemExit(f"train_pipeline.py: {error}" if os.environ.get("RANK", "0") == "0" else 1) from None
    return args


def pretrained(args: argparse.Namespace) -> model.GPT:
    """The whole model after some steps on random windows: every process makes it, and keeps its stage."""
    torch.manual_seed(args.seed)
    gpt = model.GPT().to(args.device)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3, fused=True)
    for step in range(args.pretrain):
        x, y = args.corpus.batch(args.batch, CONFIG.context, seed=args.seed, step=step, rank=0)
        gpt(x.to(args.device), y.to(args.device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return gpt


def sent() -> int:
    """Bytes that this rank has sent in messages and averages, frames and announcements included."""
    ops = ("quantized_adam", "quantized_adam_warmup", "outer_step")
    return sent_in_messages() + reduced_bytes() + sum(map(sent_bytes, ops))


class ExactAverage(torch.optim.AdamW):
    """AdamW whose gradients are averaged over the replicas of this stage, exactly."""

    def __init__(self, parameters: Any, lr: float, group: dist.ProcessGroup) -> None:
        super().__init__(parameters, lr=lr, fused=True)
        self.replicas = group

    def step(self, closure: Any = None) -> Any:
        """Averages, and makes AdamW's step."""
        if dist.get_world_size(self.replicas) > 1:
            for parameter in self.param_groups[0]["params"]:
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, group=self.replicas)
        return super().step(closure)


def optimizer_of(args: argparse.Namespace, part: Part, mesh: DeviceMesh, coded: bool) -> torch.optim.Optimizer:
    """The optimizer of one stage, which averages with the same stage of the other replicas."""
    if coded and args.optimizer == "quantized_adam":
        warmup = max(3, args.epochs * (args.samples // args.replicas // args.batch) // 5)
        return lc.QuantizedAdam(part.parameters(), lr=args.lr, warmup_steps=warmup, group=mesh.get_group("replica"))
    if coded and args.optimizer == "diloco":
        inner = torch.optim.AdamW(part.parameters(), lr=args.lr, fused=True)
        return lc.DiLoCoX(inner, args.sync_every, mesh=mesh, mode="sync", codec="gauss4")
    return ExactAverage(part.parameters(), args.lr, mesh.get_group("replica"))


def cache_of(args: argparse.Namespace) -> lc.pipeline.Cache | None:
    """What this rank remembers of each sample: in RAM, or in a folder of its own."""
    if args.cache == "none":
        return None
    if args.cache == "ram":
        return lc.pipeline.Cache()
    return lc.pipeline.Cache(
        folder=Path(args.cache) / f"rank{dist.get_rank()}", run=f"train_pipeline, seed {args.seed}"
    )


def train(args: argparse.Namespace, gpt: model.GPT, mesh: DeviceMesh, coded: bool) -> Result:
    """Fine-tunes one pipeline, or several replicas, and measures it. Losses and perplexity are known to the last stage."""
    index, stages = mesh.get_local_rank("stage"), mesh.size(1)
    cache = cache_of(args) if coded else None
    codecs = {"forward": args.forward, "backward": args.backward, "first_visit": args.first_visit} if coded else {}
    part = Part(copy.deepcopy(gpt), index, stages)
    stage = lc.pipeline.Stage(part, index, stages, args.device, group=mesh.get_group("stage"), cache=cache, **codecs)
    schedule = SCHEDULES[args.schedule](stage, n_microbatches=args.micro_batches, loss_fn=loss_of)
    optimizer = optimizer_of(args, part, mesh, coded)
    changes = f"{args.forward} changes" if cache else args.forward
    average = f", {args.optimizer}" if args.replicas > 1 else ""
    result = Result(f"{changes}, {args.backward} gradients{average}" if coded else "exact")
    x, y = args.corpus.batch(args.samples, CONFIG.context, seed=args.seed, step=0, rank=1)
    dataset = list(zip(x, y, strict=True))
    parts = {"replica": mesh.get_local_rank("replica"), "replicas": args.replicas}
    before, start = sent(), time.monotonic()
    progress = tqdm(
        lc.pipeline.batches(dataset, batch=args.batch, seed=args.seed, epochs=args.epochs, cache=cache, **parts),
        total=args.epochs * (args.samples // args.replicas // args.batch),
        desc=result.label,
        disable=dist.get_rank() != stages - 1,
        mininterval=1,
    )
    for samples, tokens, targets in progress:
        losses: list[Tensor] = []
        numbers = {"samples": samples} if cache else {}
        tokens, targets = tokens.to(args.device), targets.to(args.device)
        lc.pipeline.step(schedule, tokens, target=targets, losses=losses, **numbers)
        optimizer.step()
        optimizer.zero_grad()
        result.loss.append(torch.stack(losses).mean().item() if losses else math.nan)
        result.sent_bytes.append(sent() - before)
        result.seconds.append(time.monotonic() - start)
        progress.set_postfix(loss=f"{result.loss[-1]:.3f}", MB=f"{result.sent_bytes[-1] / 1e6:.1f}", refresh=False)
    if isinstance(optimizer, lc.DiLoCoX):
        optimizer.finish()
    result.cache_bytes = cache.bytes if cache else 0
    if cache:
        cache.flush()
    result.perplexity = perplexity(args, schedule)
    return result


def perplexity(args: argparse.Namespace, schedule: Any) -> float:
    """By exact messages, on text that no run has seen; known to the last stage."""
    losses: list[Tensor] = []
    for i in range(8):
        x, y = args.corpus.validation_batch(args.batch, CONFIG.context, i)
        of_batch: list[Tensor] = []  # torch empties the list at each call
        lc.pipeline.evaluate(schedule, x.to(args.device), target=y.to(args.device), losses=of_batch)
        losses += of_batch
    return math.exp(torch.stack(losses).mean().item()) if losses else math.nan


def table(results: list[Result], epoch: int) -> str:
    """A column a run; `epoch` is the steps of one."""
    exact = results[0]
    rows = {
        "": [r.label for r in results],
        "train loss, first epoch": [f"{sum(r.loss[:epoch]) / epoch:.4f}" for r in results],
        "train loss, last epoch": [f"{sum(r.loss[-epoch:]) / epoch:.4f}" for r in results],
        "validation perplexity": [f"{r.perplexity:.3f}" for r in results],
        "sent by the last stage, MB": [f"{r.sent_bytes[-1] / 1e6:.2f}" for r in results],
        "fewer bytes, times": [f"{exact.sent_bytes[-1] / max(1, r.sent_bytes[-1]):.1f}" for r in results],
        "cache of the last stage, MB": [f"{r.cache_bytes / 1e6:.1f}" for r in results],
        "seconds": [f"{r.seconds[-1]:.1f}" for r in results],
    }
    width = max(36, 4 + max(len(r.label) for r in results))
    return "\n".join(f"{name:<30}" + "".join(f"{cell:>{width}}" for cell in cells) for name, cells in rows.items())


def main() -> None:
    """Trains twice and reports on the last rank."""
    args = parse()
    torch.set_num_threads(1)
    dist.init_process_group("lowcomm")
    stages, left = divmod(dist.get_world_size(), args.replicas)
    if left or not 2 <= stages <= CONFIG.layers:
        raise SystemExit(
            f"train_pipeline.py: expected 2 to {CONFIG.layers} processes for each of {args.replicas} replicas, got "
            f"{dist.get_world_size()}"
        )
    mesh = init_device_mesh(args.device.type, (args.replicas, stages), mesh_dim_names=("replica", "stage"))
    gpt = pretrained(args)
    results = [train(args, gpt, mesh, coded) for coded in (False, True)]
    if dist.get_rank() == stages - 1:
        print("\n" + table(results, args.samples // args.replicas // args.batch))
        title = f"{args.replicas} x {stages} stages, {args.epochs} epochs of {args.samples} samples"
        plot.loss_against_bytes(results, args.plot, title=title)
        print(f"loss against bytes: {args.plot}")
        print(lc.summary())
        if args.json:
            args.json.write_text(json.dumps([dataclasses.asdict(result) for result in results]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
