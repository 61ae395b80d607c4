"""Whether a short message overtakes bulk: one group's barrier on a link that another group's all_gathers fill."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from datetime import timedelta

import report
from tables import Columns

from linklab.job import job_of_host, leave, run_on_hosts
from linklab.lab import Lab
from linklab.link import ideal_s, parse_bits

RATE = "10mbit"
CHUNK_BYTES = 256 << 10  # of a frame, by default
ELEMENTS = 1 << 18  # a rank's part of an all_gather: 1 MiB, most of a second at 10 Mbit/s
OPS = 24
_PORT = 29301
_DEADLINE_S = 300


def main(args: argparse.Namespace) -> int:
    """Measures, prints, and judges a loaded barrier by two loaded pings and the time of a chunk."""
    options = {"rate": RATE, "repetitions": args.repetitions, "chunk_bytes": CHUNK_BYTES}
    print(report.heading("linklab lanes", **options), flush=True)
    with Lab(hosts=2, rate=RATE) as lab:
        addresses = [lab.address(host) for host in range(2)]
        seconds = run_on_hosts(lab, "linklab.lanes", {"addresses": addresses, "repetitions": args.repetitions})[0]
    columns = Columns("what and link 16 | median ms 10.2f | least 10.2f | most 10.2f")
    print(columns.heading())
    for name, times in seconds.items():
        print(columns.row(name, *(1e3 * of(times) for of in (statistics.median, min, max))))
    chunk_s = ideal_s(CHUNK_BYTES, parse_bits(RATE))
    bound = 2 * statistics.median(seconds["ping loaded"]) + chunk_s
    gate = report.Gate(
        "a loaded barrier / (two loaded pings and a chunk)",
        statistics.median(seconds["barrier loaded"]) / bound,
        "<=",
        1.0,
    )
    return report.finish([gate], args.json, {"options": options, "seconds": seconds})


def _rank() -> None:
    """One rank: idle times, then all_gathers of one group under way and the times of the other's barriers."""
    import torch
    import torch.distributed as dist

    import torch_lowcomm  # noqa: F401
    from linklab import raw

    job, finish = job_of_host()
    dist.init_process_group("gloo", timeout=timedelta(seconds=_DEADLINE_S))
    rank = dist.get_rank()
    peer = raw.mesh(rank, job["addresses"], _PORT, _DEADLINE_S)[1 - rank]
    bulk, control = (dist.new_group([0, 1], backend="lowcomm") for _ in range(2))

    def ping() -> None:
        if rank == 0:
            peer.sendall(b"?")
        peer.recv(1)
        if rank == 1:
            peer.sendall(b"!")

    def timed(act: Callable[[], object]) -> float:
        start = time.monotonic()
        act()
        return time.monotonic() - start

    seconds: dict[str, list[float]] = {}
    works, outputs = [], []
    for link in ("idle", "loaded"):
        if link == "loaded":
            for number in range(OPS):
                outputs.append(torch.empty(2 * ELEMENTS))
                part = torch.full((ELEMENTS,), float(10 * number + rank))
                works.append(dist.all_gather_into_tensor(outputs[-1], part, group=bulk, async_op=True))
            time.sleep(1)  # the queues fill
        for _ in range(job["repetitions"]):
            seconds.setdefault(f"ping {link}", []).append(timed(ping))
            seconds.setdefault(f"barrier {link}", []).append(timed(lambda: dist.barrier(group=control)))
    left = sum(not work.is_completed() for work in works)
    if left == 0:
        raise SystemExit("the bulk ended before the last barrier: nothing was measured")
    for number, work in enumerate(works):
        work.wait()
        for part, owner in zip(outputs[number].chunk(2), (0, 1), strict=True):
            if not (part == 10 * number + owner).all():
                raise SystemExit(f"all_gather {number} has other values of rank {owner}")
    finish(seconds)
    dist.barrier()
    dist.destroy_process_group(control)
    dist.destroy_process_group(bulk)
    leave()


if __name__ == "__main__":
    _rank()
