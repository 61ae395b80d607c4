r"""Trains a byte-level GPT in clusters that hardly talk: an outer loop around AdamW, next to the same run exact.

    torchrun --standalone --nproc-per-node 2 examples/train_diloco.py

trains 0.82 M parameters on the sources of Python's own library twice, once averaging every gradient and once with
`lc.DiLoCoX`, every cluster one process here, in about a minute and a half on two cores, draws loss against bytes sent and against
seconds into runs/train_diloco.png, and ends with a table like this one (Python 3.11, torch 2.13.0, AMD EPYC, both ranks on
loopback; the seconds depend on the machine, the bytes do not). It trains by few, short steps, where averaging seldom costs loss:

                                                             exact, every step continue, every 20, sym4:bucket=128
    train loss, mean of the last 20 steps                               1.7556                              1.9590
    validation perplexity                                                5.520                               6.306
    sent by a rank, MB                                                 1312.56                                8.74
    fewer bytes, times                                                     1.0                               150.2
    seconds                                                               32.7                                23.9
    of these, waited for averages                                            -                                0.26

Machines that come and go, each a launcher of its own, meet at a store, which is a process of its own:

    python -m torch_lowcomm store --listen 127.0.0.1:29400 &
    python examples/train_diloco.py --store 127.0.0.1:29400 --machine a --min-machines 2 &
    python examples/train_diloco.py --store 127.0.0.1:29400 --machine b --min-machines 2

Kill a machine and the other goes on where `--min-machines` lets it; start it again and it takes the model, the momentum and the
count of steps from the other. Each writes runs/diloco-<machine>.json at its end, or when Ctrl-C or SIGTERM ends it.

A machine may be a site of several ranks, which shard the model by FSDP2 and come and go together:

    torchrun --nproc-per-node 2 --max-restarts 3 --master-port 29501 \
        examples/train_diloco.py --store 127.0.0.1:29400 --site a --min-machines 2 &
    torchrun --nproc-per-node 2 --max-restarts 3 --master-port 29502 \
        examples/train_diloco.py --store 127.0.0.1:29400 --site b --min-machines 2
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import signal
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import data
import device
import model
import plot
import torch
import torch.distributed as dist
from measure import means_over_ranks, reduced_bytes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import torch_lowcomm as lc

CONTEXT = model.Config().context


@dataclasses.dataclass
class Result(plot.Curve):
    """The result of one run: its curve and the columns of the final table."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    waited_s: float = 0.0
    perplexity: float = math.nan
    losses: int = 0  # of machines
    machines: list[int] = dataclasses.field(default_factory=list)  # participating, an outer step
    first_step: int = 0
    asked: bool = False  # by a signal, to end
    ended: bool = False  # because of it


def parse() -> argparse.Namespace:
    """Reads and checks the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], usage="%(prog)s [options]; see --help")
    parser.add_argument("--data", type=Path, help="a text file or a directory of them (default: Python's own sources)")
    parser.add_argument("--sync-every", type=int, default=20, help="inner steps from one outer step to the next")
    parser.add_argument("--mode", default="continue", choices=("sync", "continue", "restart"))
    parser.add_argument("--codec", default="sym4:bucket=128", help="of pseudo-gradients")
    parser.add_argument("--rank", type=int, help="of low-rank factors; none without it")
    parser.add_argument("--only", choices=("exact", "outer"), help="train one of the two")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=8, help=f"windows of {CONTEXT} bytes a rank and step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", help="host:port where machines meet, in place of torchrun")
    parser.add_argument("--machine", help="this one's id there")
    parser.add_argument("--site", help="in place of --machine, of all ranks that one torchrun starts: their site's id")
    parser.add_argument("--min-machines", type=int, default=1, help="machines that there must be")
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds without a byte until a machine is given up"
    )
    parser.add_argument(
        "--plot", type=Path, default=Path("runs/train_diloco.png"), help="loss against bytes and seconds"
    )
    parser.add_argument("--json", type=Path, help="the curves and the table's numbers, exactly")
    device.add_argument(parser)
    args = parser.parse_args()
    try:
        for name in ("steps", "batch", "lr", "sync_every", "min_machines", "timeout"):
            if not getattr(args, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} expects a positive number, got {getattr(args, name)}")
        lc.codec(args.codec)
        args.device = device.choose(args.device)
        args.corpus = data.load(args.data, context=CONTEXT).to(args.device)
        if args.store is None:
            if args.machine or args.site:
                raise ValueError(f"--{'machine' if args.machine else 'site'} expects --store HOST:PORT, got none")
            if "RANK" not in os.environ:
                raise ValueError("expected to be started by torchrun --standalone --nproc-per-node 2, got no RANK")
        else:
            host, _, port = args.store.rpartition(":")
            if not host or not port.isdigit():
                raise ValueError(f"--store expects HOST:PORT, got {args.store!r}")
            if not (args.machine or args.site):
                raise ValueError("--store expects --machine ID or --site ID with it, got neither")
            if args.site and (args.machine or "RANK" not in os.environ):
                got = "--machine too" if args.machine else "no RANK"
                raise ValueError(f"--site expects to be started by torchrun, and no --machine, got {got}")
            args.address = (host, int(port))
        args.runs = [args.only] if args.only else ["outer"] if args.store else ["exact", "outer"]
    except (ValueError, OSError) as error:
        # Every rank finds the same mistake; one of them says so.
        raise SystemExit(f"train_diloco.py: {error}" if os.environ.get("RANK", "0") == "0" else 1) from None
    return args


def outer_loop(gpt: model.GPT, args: argparse.Namespace, group: lc.Membership | None) -> lc.DiLoCoX:
    """AdamW, and an outer loop around it."""
    return lc.DiLoCoX(
        torch.optim.AdamW(gpt.parameters(), lr=args.lr, fused=True),
        args.sync_every,
        mode=args.mode,
        # DiLoCoX's paper gives no number; a tenth of all is our choice.
        sync_warmup=args.steps // args.sync_every // 10,
        codec=args.codec,
        rank=args.rank,
        model=gpt,
        group=group,
    )


def train(args: argparse.Namespace, run: str, rank: int, members: lc.Membership | None = None) -> Result:
    """Trains one model and measures it."""
    torch.manual_seed(args.seed)
    gpt = model.GPT().to(args.device)
    if args.site:
        mesh = init_device_mesh(torch.device(args.device).type, (dist.get_world_size(),))
        for block in gpt.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(gpt, mesh=mesh)
    if run == "exact":
        trained, optimizer = DistributedDataParallel(gpt), torch.optim.AdamW(gpt.parameters(), lr=args.lr, fused=True)
        result = Result("exact, every step")
    else:
        trained, optimizer = gpt, outer_loop(gpt, args, members)
        result = Result(
            f"{args.mode}, every {args.sync_every}, {args.codec}" + (f", rank {args.rank}" if args.rank else "")
        )
        result.first_step = optimizer.steps  # of a machine that came late: the others'
        if members is not None:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: setattr(result, "asked", True))
    counted = reduced_bytes if run == "exact" else lambda: optimizer.report["total_sent_bytes"]
    before, start, step = counted(), time.monotonic(), result.first_step
    quiet = dist.is_initialized() and dist.get_rank() != 0
    progress = tqdm(initial=step, total=args.steps, desc=run, disable=quiet, mininterval=1)
    outer_steps = 0 if run == "exact" else optimizer.report["outer_steps"]
    finished = False
    while not finished:
        while not ends(result, in_site=bool(args.site)) and step < args.steps:
            loss = trained(*args.corpus.batch(args.batch, CONTEXT, seed=args.seed, step=step, rank=rank))
            loss.backward()
            with survived(optimizer, members, result, progress):
                optimizer.step()
            if members is not None and optimizer.regroup_due:
                regroup(optimizer, result, progress)
            optimizer.zero_grad()
            step = step + 1 if run == "exact" else optimizer.steps
            result.loss.append(loss.item())
            result.sent_bytes.append(counted() - before)
            result.seconds.append(time.monotonic() - start)
            progress.update(step - progress.n)
            shown = {"loss": f"{result.loss[-1]:.3f}", "MB": f"{result.sent_bytes[-1] / 1e6:.2f}"}
            if run == "outer":
                report = optimizer.report
                if report["outer_steps"] != outer_steps:
                    outer_steps = report["outer_steps"]
                    result.machines.append(report["participating"])
                waited = report["total_waited_s"] / result.seconds[-1]
                shown |= {"machines": f"{report['participating']} of {report['alive']}", "waited": f"{waited:.1%}"}
            progress.set_postfix(shown, refresh=False)
        finished = run == "exact" or result.ended
        if not finished:
            with survived(optimizer, members, result, progress):
                optimizer.finish()
                finished = True
            step = optimizer.steps
    if run == "outer" and result.loss:
        result.waited_s = optimizer.report["total_waited_s"]
        result.sent_bytes[-1] = counted() - before  # with the last average
    progress.close()
    if result.ended:
        optimizer.restore()  # the others train on, or end at another step
    if members is None:
        result.loss = means_over_ranks(result.loss)
    with torch.no_grad():
        batches = [args.corpus.validation_batch(32, CONTEXT, i) for i in range(16)]
        result.perplexity = math.exp(torch.stack([gpt(*batch) for batch in batches]).mean().item())
    return result


def ends(result: Result, *, in_site: bool) -> bool:
    """Whether a signal has asked for the end. The ranks of a site, who hear it at different steps, end after the same one."""
    asked = torch.tensor([int(result.asked)])
    if in_site:
        dist.all_reduce(asked, dist.ReduceOp.MAX)
    result.ended = bool(asked)
    return result.ended


@contextmanager
def survived(optimizer: Any, members: lc.Membership | None, result: Result, progress: tqdm) -> Iterator[None]:
    """After the loss of a machine the others form another group.

    Outer parameters and momentum are as after the last outer step, and what was trained since is still here.
    """
    try:
        yield
    except dist.DistBackendError as error:
        if members is None:
            raise
        progress.write(str(error).splitlines()[0])
        result.losses += 1
        regroup(optimizer, result, progress)


def regroup(optimizer: Any, result: Result, progress: tqdm) -> None:
    """Forms another group. Where too few machines are left, this one ends, too."""
    try:
        optimizer.regroup()
    except TimeoutError as error:
        progress.write(str(error))
        result.asked = True


def table(results: list[Result]) -> str:
    """A column a run."""
    exact = results[0]
    rows = {
        "": [r.label for r in results],
        "train loss, mean of the last 20 steps": [f"{sum(r.loss[-20:]) / len(r.loss[-20:]):.4f}" for r in results],
        "validation perplexity": [f"{r.perplexity:.3f}" for r in results],
        "sent by a rank, MB": [f"{r.sent_bytes[-1] / 1e6:.2f}" for r in results],
        "fewer bytes, times": [f"{exact.sent_bytes[-1] / max(1, r.sent_bytes[-1]):.1f}" for r in results],
        "seconds": [f"{r.seconds[-1]:.1f}" for r in results],
        "of these, waited for averages": [f"{r.waited_s:.2f}" if r.machines else "-" for r in results],
    }
    return "\n".join(f"{name:<38}" + "".join(f"{cell:>36}" for cell in cells) for name, cells in rows.items())


def at_the_store(args: argparse.Namespace) -> None:
    """One machine of those that come and go, or a rank of such a site."""
    name, place = args.machine or args.site, 0
    if args.site:
        dist.init_process_group("lowcomm", timeout=timedelta(seconds=args.timeout))
        place = dist.get_rank()
    store = dist.TCPStore(*args.address, is_master=False, timeout=timedelta(seconds=args.timeout))
    members = lc.Membership(
        store,
        name,
        site=dist.group.WORLD if args.site else None,
        min_machines=args.min_machines,
        patience_s=args.timeout / 2,
        timeout=timedelta(seconds=args.timeout),
    )
    text = zlib.crc32(name.encode()) % 1000 + 1000 * place  # every rank reads other parts of it
    result = train(args, "outer", text, members)
    members.leave()
    if args.site:
        dist.destroy_process_group()
    if place != 0:
        return
    file = args.json or Path(f"runs/diloco-{name}.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(dataclasses.asdict(result)))
    print(f"{name}: {result.losses} losses of machines, perplexity {result.perplexity:.3f}; {file}")


def main() -> None:
    """Trains once or twice and reports on rank 0."""
    args = parse()
    torch.set_num_threads(1)
    if args.store:
        return at_the_store(args)
    dist.init_process_group("lowcomm")
    results = [train(args, run, dist.get_rank()) for run in args.runs]
    if dist.get_rank() == 0:
        print("\n" + table(results))
        title = f"{args.steps} steps, {dist.get_world_size()} clusters"
        plot.loss_against_bytes_and_seconds(results, [r.seconds for r in results], args.plot, title=title)
        print(f"loss against bytes and seconds: {args.plot}")
        print(lc.summary())
        if args.json:
            args.json.write_text(json.dumps([dataclasses.asdict(result) for result in results]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
