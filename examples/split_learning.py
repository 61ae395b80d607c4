"""Split learning: clients keep their images and labels, a server has the middle of the network.

    apt-get install dataset-fashion-mnist
    torchrun --standalone --nproc-per-node 2 examples/split_learning.py

trains a small residual network on images of Fashion-MNIST three times from the same weights: with exact messages, with codes of
2 bits forward and of 8 bits backward for the largest fifth of the gradients, and with the same codes of changes (AQ-SGD, arXiv
2206.01299, appendix H.6). The network is cut after its first block and before its last one. The first process has these two
parts and all 16 clients, whose classes differ (Dirichlet, concentration 0.5). Clients train in turn, three epochs each, and hand
both parts on. The second process is the server: it sees activations and the numbers of samples, and neither images nor labels.

Each visit mirrors an image or not, and crops it. A mirrored image is a sample of its own to the caches. The server crops, after
the cut, so that activations differ from visit to visit only by what the first block has learned. A minute and a half on two
cores; it ends with a table like this one (torch 2.13.0, AMD EPYC, both processes on loopback):

                                            exact               gauss2    changes in gauss2
    train loss, last 50 batches            1.1272               1.1326               1.0786
    test loss                              1.2774               1.2258               1.2343
    test accuracy                          0.5300               0.5135               0.5310
    sent by the clients, MB                 676.5                 47.1                 64.0
    sent by the server, MB                  629.2                 47.6                 56.5
    fewer bytes, times                        1.0                 13.8                 10.8
    seconds                                  24.0                 25.4                 27.4
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import time
from pathlib import Path

import device
import images
import plot
import torch
import torch.distributed as dist
from measure import sent_in_messages
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

import torch_lowcomm as lc

CLIENT, SERVER = 0, 1
# Images have no order in time: a code over the ends of samples tells nothing that training could use.
CODES = {"forward": "gauss2", "backward": "topk:keep=0.2,values=sym8", "unit": "message"}
FIRST = "minmax8:bucket=128"
CROP = 1  # pixels of the server's feature maps, either way


class Block(nn.Module):
    """A residual block: [N, channels, H, W] → [N, out, H / stride, W / stride]."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.past = nn.Conv2d(channels, out, 1, stride, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(4, out) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        y = functional.relu(self.norms[0](self.one(x)))
        return functional.relu(self.past(x) + self.norms[1](self.two(y)))


class Network(nn.Module):
    """[N, 1, 28, 28] → [N, 10], in three parts: the client's first, the server's, the client's last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 16, 3, 1, 1), nn.ReLU(), Block(16, 16, 2))
        self.middle = nn.Sequential(Block(16, 32, 2), Block(32, 32, 1))
        self.last = nn.Sequential(Block(32, 64, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


UP, DOWN = (16, 14, 14), (32, 7, 7)  # what crosses the two cuts, a sample


@dataclasses.dataclass
class Result(plot.Curve):
    """One run: its curve and the columns of the table. The first rank has them."""

    test_loss: float = 0.0  # by exact messages, as the accuracy
    accuracy: float = 0.0
    seconds: float = 0.0
    from_clients: int = 0  # bytes
    from_server: int = 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads and checks a command line: the program's own, or the one that another program gives."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], usage="%(prog)s [options]; see --help")
    parser.add_argument("--data", type=Path, help="a folder with Fashion-MNIST's IDX files (default: Debian's package)")
    parser.add_argument("--images", type=int, default=3200, help="of the training set, of all clients")
    parser.add_argument("--test-images", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--concentration", type=float, default=0.5, help="of the clients' classes")
    parser.add_argument("--rounds", type=int, default=4, help="in which every client has its turn")
    parser.add_argument("--epochs", type=int, default=3, help="of a client's turn")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--decay", type=float, default=0.25, help="of the rate, from each round to the next")
    parser.add_argument("--forward", default=CODES["forward"], help="codec of activations, or of their changes")
    parser.add_argument("--backward", default=CODES["backward"], help="codec of gradients")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=Path("runs/split_learning.png"), help="loss against bytes")
    parser.add_argument("--json", type=Path, help="the curves and the table's numbers, exactly")
    device.add_argument(parser)
    args = parser.parse_args(arguments)
    try:
        for name in ("images", "test_images", "clients", "concentration", "rounds", "epochs", "batch", "lr", "decay"):
            if not getattr(args, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} expects a positive number, got {getattr(args, name)}")
        for codec in (args.forward, args.backward):
            lc.codec(codec)
        args.device = device.choose(args.device)
        args.train, args.test = (images.load(args.data, train=train) for train in (True, False))
        if arguments is None and "RANK" not in os.environ:
            raise ValueError("expected to be started by torchrun --standalone --nproc-per-node 2, got no RANK")
    except ValueError as error:
        raise SystemExit(f"split_learning.py: {error}") from None
    return args


def turns(args: argparse.Namespace, clients: list[Tensor]) -> list[Tensor]:
    """Every batch of a run: clients in turn, round after round; int64 [rows, 4] of (image, mirrored, crop's row, its column)."""
    generator = torch.Generator().manual_seed(args.seed)
    batches = []
    for _ in range(args.rounds):
        for numbers in clients:
            for _ in range(args.epochs):
                order = numbers[torch.randperm(len(numbers), generator=generator)]
                chance = [
                    torch.randint(most, (len(order),), generator=generator) for most in (2, 2 * CROP + 1, 2 * CROP + 1)
                ]
                batches += torch.stack([order, *chance], dim=1).split(args.batch)
    return batches


def cropped(h: Tensor, rows: Tensor) -> Tensor:
    """[N, C, H, W], each shifted by its crop, with zeros at the border."""
    padded, (height, width) = functional.pad(h, (CROP,) * 4), h.shape[2:]
    return torch.stack(
        [x[:, r : r + height, c : c + width] for x, (_, _, r, c) in zip(padded, rows.tolist(), strict=True)]
    )


class Cuts:
    """The two cuts, as one side has them: activations go up to the server and down to the client."""

    def __init__(self, peer: int, args: argparse.Namespace, how: str) -> None:
        self.coded, self.remembers = how != "exact", how == "changes"
        channel = 2 * ("exact", "codes", "changes").index(how)
        codecs = (
            {"forward": args.forward, "backward": args.backward, "first_visit": FIRST, "unit": CODES["unit"]}
            if self.coded
            else {}
        )
        self.up, self.down = (
            lc.pipeline.Edge(peer, channel + i, cache=lc.pipeline.Cache() if self.remembers else None, **codecs)
            for i in range(2)
        )

    def samples(self, rows: Tensor) -> dict[str, Tensor]:
        """How a batch's samples are called, where they are remembered."""
        return {"samples": 2 * rows[:, 0] + rows[:, 1]} if self.remembers and torch.is_grad_enabled() else {}


def client_step(network: Network, cuts: Cuts, x: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
    """The client's part of one step, with gradients where these are enabled. Returns the logits."""
    names = cuts.samples(rows)
    up = cuts.up.send(network.first(x), **names)
    down = cuts.down.recv(torch.empty(len(x), *DOWN, device=x.device), **names)
    logits = network.last(down)
    if torch.is_grad_enabled():
        functional.cross_entropy(logits, labels).backward()  # as far as the cut, and across it
        up.backward()  # from the other one on
    return logits.detach()


def server_step(network: Network, cuts: Cuts, rows: Tensor, place: torch.device) -> None:
    """The server's part of it."""
    names = cuts.samples(rows)
    h = cuts.up.recv(torch.empty(len(rows), *UP, device=place), **names)
    down = cuts.down.send(network.middle(cropped(h, rows)), **names)
    if torch.is_grad_enabled():
        down.backward()


def train(args: argparse.Namespace, network: Network, how: str, batches: list[Tensor]) -> Result:
    """One run on this side of the cuts."""
    rank = dist.get_rank()
    mine = [network.middle] if rank == SERVER else [network.first, network.last]
    optimizer = torch.optim.SGD([p for part in mine for p in part.parameters()], lr=args.lr, momentum=0.9)
    rates = torch.optim.lr_scheduler.StepLR(optimizer, -(-len(batches) // args.rounds), args.decay)
    cuts = Cuts(1 - rank, args, how)
    result = Result({"exact": "exact", "codes": f"{args.forward}", "changes": f"changes in {args.forward}"}[how])
    before, start = sent_in_messages(), time.monotonic()
    for rows in tqdm(batches, desc=result.label, disable=None if rank == CLIENT else True, mininterval=1):
        if rank == SERVER:
            server_step(network, cuts, rows, args.device)
        else:
            x, labels = (part[rows[:, 0]].to(args.device) for part in args.train)
            x = torch.where(rows[:, 1].view(-1, 1, 1, 1).to(x.device) == 1, x.flip(3), x)
            logits = client_step(network, cuts, x, labels, rows)
            result.loss.append(functional.cross_entropy(logits, labels).item())
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        result.sent_bytes.append(sent_in_messages() - before)
    for edge in (cuts.up, cuts.down):
        edge.finish()
    result.seconds = time.monotonic() - start
    sent = torch.zeros(2, dtype=torch.int64)
    sent[rank] = result.sent_bytes[-1]
    dist.all_reduce(sent)
    result.from_clients, result.from_server = sent.tolist()
    result.test_loss, result.accuracy = tested(args, network, cuts)
    return result


@torch.no_grad()
def tested(args: argparse.Namespace, network: Network, cuts: Cuts) -> tuple[float, float]:
    """The mean loss of test images by exact messages, uncropped, and the share that is told right; known to the clients."""
    right, loss = 0, 0.0
    for numbers in torch.arange(min(args.test_images, len(args.test[1]))).split(500):
        rows = torch.stack([numbers, *(torch.full_like(numbers, value) for value in (0, CROP, CROP))], dim=1)
        if dist.get_rank() == SERVER:
            server_step(network, cuts, rows, args.device)
        else:
            x, labels = (part[numbers].to(args.device) for part in args.test)
            logits = client_step(network, cuts, x, labels, rows)
            right += int((logits.argmax(1) == labels).sum())
            loss += functional.cross_entropy(logits, labels, reduction="sum").item()
    for edge in (cuts.up, cuts.down):
        edge.finish()  # the server would end its group before its last message is through
    count = min(args.test_images, len(args.test[1]))
    return loss / count, right / count


def batches_of(args: argparse.Namespace) -> list[Tensor]:
    """turns(), of which the clients tell the server: it knows the numbers of samples, and nothing else of them."""
    told = torch.zeros(2, dtype=torch.int64)
    if dist.get_rank() == CLIENT:
        clients = images.deal(args.train[1], args.clients, concentration=args.concentration, seed=args.seed)
        batches = turns(args, [numbers for numbers in clients if len(numbers)])
        sizes, rows = torch.tensor([len(batch) for batch in batches]), torch.cat(batches)
        told = torch.tensor([len(sizes), len(rows)])
    dist.broadcast(told, CLIENT)
    if dist.get_rank() == SERVER:
        sizes, rows = torch.empty(int(told[0]), dtype=torch.int64), torch.empty(int(told[1]), 4, dtype=torch.int64)
    dist.broadcast(sizes, CLIENT)
    dist.broadcast(rows, CLIENT)
    return list(rows.split(sizes.tolist()))


def table(results: list[Result]) -> str:
    """A column a run."""
    exact = results[0]
    rows = {
        "": [r.label for r in results],
        "train loss, last 50 batches": [f"{sum(r.loss[-50:]) / len(r.loss[-50:]):.4f}" for r in results],
        "test loss": [f"{r.test_loss:.4f}" for r in results],
        "test accuracy": [f"{r.accuracy:.4f}" for r in results],
        "sent by the clients, MB": [f"{r.from_clients / 1e6:.1f}" for r in results],
        "sent by the server, MB": [f"{r.from_server / 1e6:.1f}" for r in results],
        "fewer bytes, times": [
            f"{(exact.from_clients + exact.from_server) / (r.from_clients + r.from_server):.1f}" for r in results
        ],
        "seconds": [f"{r.seconds:.1f}" for r in results],
    }
    width = 4 + max(len(r.label) for r in results)
    return "\n".join(f"{name:<28}" + "".join(f"{cell:>{width}}" for cell in cells) for name, cells in rows.items())


def all_runs(args: argparse.Namespace) -> tuple[list[Result], int]:
    """The three runs from the same weights on this side of the cuts, and the number of batches of each."""
    torch.manual_seed(args.seed)
    chosen = torch.randperm(len(args.train[1]))[: args.images]
    args.train = args.train[0][chosen], args.train[1][chosen]
    network, batches = Network().to(args.device), batches_of(args)
    return [train(args, copy.deepcopy(network), how, batches) for how in ("exact", "codes", "changes")], len(batches)


def main() -> None:
    """Trains three times and reports on the clients' process."""
    args = parse()
    torch.set_num_threads(1)
    dist.init_process_group("lowcomm")
    if dist.get_world_size() != 2:
        raise SystemExit(f"split_learning.py: expected 2 processes, got {dist.get_world_size()}")
    results, batches = all_runs(args)
    if dist.get_rank() == CLIENT:
        print("\n" + table(results))
        title = f"{args.clients} clients, {args.images} images, {args.rounds} rounds of {args.epochs} epochs"
        turn = batches // args.rounds  # of all clients, whose losses differ
        plot.loss_against_bytes(results, args.plot, title=title, unit="nats", recent=max(1, turn))
        print(f"loss against bytes: {args.plot}")
        if args.json:
            args.json.write_text(json.dumps([dataclasses.asdict(result) for result in results]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
