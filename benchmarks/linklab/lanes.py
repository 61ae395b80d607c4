"""Whether a short message overtakes bulk: one group's barrier on a link that another group's all_gathers fill."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import report

from linklab import validate
from linklab.errors import LabError
from linklab.lab import Lab
from linklab.link import ideal_s, parse_bits

RATE = "10mbit"
CHUNK_BYTES = 256 << 10  # of a frame, by default
ELEMENTS = 1 << 18  # a rank's part of an all_gather: 1 MiB, most of a second at 10 Mbit/s
OPS = 24
_PORT = 29301
_DEADLINE_S = 300


def measure(lab: Lab, repetitions: int) -> dict[str, list[float]]:
    """Rank 0's seconds: pings and barriers, idle and loaded. LabError when a rank fails or a gathered value is wrong."""
    with tempfile.TemporaryDirectory(prefix="linklab-") as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps({"addresses": [lab.address(host) for host in range(2)], "repetitions": repetitions}))
        ended = lab.run(
            [sys.executable, "-m", "linklab.lanes", str(path)], timeout_s=_DEADLINE_S, env=validate.ON_HOSTS
        )
        for rank, one in enumerate(ended):
            if one.code:
                raise LabError(f"expected exit code 0 on rank {rank}, got {one.code}\n{one.output[-3000:]}")
        return json.loads(path.with_name("measured.json").read_text())


def main(args: argparse.Namespace) -> int:
    """Measures, prints, and judges a loaded barrier by two loaded pings and the time of a chunk."""
    options = {"rate": RATE, "repetitions": args.repetitions, "chunk_bytes": CHUNK_BYTES}
    print(report.heading("linklab lanes", **options), flush=True)
    with Lab(hosts=2, rate=RATE) as lab:
        seconds = measure(lab, args.repetitions)
    print(f"# {'what':<10}{'link':<10}{'median ms':>10}{'least':>10}{'most':>10}")
    for name, times in seconds.items():
        what, link = name.split()
        print(
            f"  {what:<10}{link:<10}{statistics.median(times) * 1e3:>10.2f}{min(times) * 1e3:>10.2f}"
            f"{max(times) * 1e3:>10.2f}"
        )
    chunk_s = ideal_s(CHUNK_BYTES, parse_bits(RATE))
    bound = 2 * statistics.median(seconds["ping loaded"]) + chunk_s
    gate = report.Gate(
        "a loaded barrier / (two loaded pings and a chunk)",
        statistics.median(seconds["barrier loaded"]) / bound,
        "<=",
        1.0,
    )
    return report.finish([gate], args.json, {"options": options, "seconds": seconds})


def _rank(path: Path) -> None:
    """One rank: idle times, then all_gathers of one group under way and the times of the other's barriers."""
    import torch
    import torch.distributed as dist

    import torch_lowcomm  # noqa: F401
    from linklab import raw

    job = json.loads(path.read_text())
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
    if rank == 0:
        path.with_name("measured.json").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group(control)
    dist.destroy_process_group(bulk)
    sys.stdout.flush()
    os._exit(0)  # plain gloo may abort as its process ends


if __name__ == "__main__":
    _rank(Path(sys.argv[1]))
