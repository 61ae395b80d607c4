"""A rank of `benchmarks tcp_cuts`: ops over TCP while rank 0 resets its connections, compared with undisturbed ones."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from linklab.job import job_of_host

import torch_lowcomm as lc

PORT = 29811
POLICY = "all_reduce=sym4; all_gather=minmax8; reduce_scatter=sym8; p2p=sym4"
_SIZES = (300, 20_000, 100_000)  # elements a rank, of coded ops and of exact ones


def reset_connections() -> int:
    """Shuts down every connection of lowcomm's port that this process has; returns how many."""
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if not path.readlink().name.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(path.name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and PORT in (
                    one.getsockname()[1],
                    one.getpeername()[1],
                ):
                    one.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count


@contextlib.contextmanager
def resets(every_s: float) -> Iterator[None]:
    """Within, all connections of this process are reset at random times that are `every_s` apart on average; 0: never."""
    over = threading.Event()

    def loop() -> None:
        draws = random.Random(0)
        while not over.wait(draws.uniform(0.5, 1.5) * every_s):
            reset_connections()

    thread = threading.Thread(target=loop)
    if every_s:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if every_s:
            thread.join()


def _ops(group: dist.ProcessGroup) -> list[Callable[[], torch.Tensor]]:
    """Ops of seeded data, each with its result."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    draws = torch.Generator().manual_seed(rank)

    def all_reduce(mine: torch.Tensor) -> torch.Tensor:
        whole = mine.clone()
        dist.all_reduce(whole, group=group)
        return whole

    def all_gather(mine: torch.Tensor) -> torch.Tensor:
        whole = mine.new_empty(mine.numel() * ranks)
        dist.all_gather_into_tensor(whole, mine, group=group)
        return whole

    def reduce_scatter(mine: torch.Tensor) -> torch.Tensor:
        part = mine.new_empty(mine.numel() // ranks)
        dist.reduce_scatter_tensor(part, mine[: part.numel() * ranks], group=group)
        return part

    def exchange(mine: torch.Tensor) -> torch.Tensor:
        other = torch.empty_like(mine)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine, (rank + 1) % ranks, group),
                dist.P2POp(dist.irecv, other, (rank - 1) % ranks, group),
            ]
        )
        for work in works:
            work.wait()
        return other

    data = [torch.randn(n, generator=draws) for n in _SIZES]
    data += [(1000 * mine).long() for mine in data]
    kinds = (all_reduce, all_gather, reduce_scatter, exchange)
    return [lambda op=op, mine=mine: op(mine) for op, mine in itertools.product(kinds, data)]


def _resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    """Runs the job."""
    job, finish = job_of_host()
    torch.set_num_threads(1)
    os.environ["LOWCOMM_LISTEN"] = f":{PORT}"
    os.environ["LOWCOMM_TRANSPORT"] = "tcp"
    if job["secret"]:
        os.environ["LOWCOMM_SECRET"] = job["secret"]
    dist.init_process_group("lowcomm")

    def group_of(transport: str) -> dist.ProcessGroup:
        options = lc.Options(policy=POLICY, min_bytes=0, transport=transport)
        return dist.new_group(backend="lowcomm", pg_options=options)

    # With a secret nothing goes over gloo; then it is the same transport before the first reset.
    expected = [op() for op in _ops(group_of("tcp" if job["secret"] else "gloo"))]
    group = group_of("tcp")
    ops = _ops(group)
    rows = []
    for every_s in job["every_s"]:
        dist.barrier()
        before = lc.connections(group).popitem()[1]
        wrong, began, early = 0, time.monotonic(), 0
        with resets(every_s if dist.get_rank() == 0 else 0):
            for number in range(job["ops"]):
                i = number % len(ops)
                wrong += not torch.equal(ops[i](), expected[i])
                if number == job["ops"] // 10:
                    early = _resident()
        seconds = time.monotonic() - began
        after = lc.connections(group).popitem()[1]
        made = sum(one["times_made"] for one in after) - sum(one["times_made"] for one in before)
        grown_mib = (_resident() - early) / 2**20
        rows.append({"every_s": every_s, "wrong": wrong, "seconds": seconds, "made": made, "grown_mib": grown_mib})
    dist.barrier()
    dist.destroy_process_group()
    finish(rows)


if __name__ == "__main__":
    main()
