"""A rank of `benchmarks tcp_links`: the seconds and the CPU of ops over lowcomm's TCP transport, next to gloo's."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import torch_lowcomm as lc
from linklab import cases
from linklab.job import job_of_host, leave

PAUSE_S = 0.01
WARM_UP = 2
_BUSY = "import os; os.nice(0)\nwhile True: pass"


@contextlib.contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Within, so many processes compute without a pause."""
    children = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()


def group_of(kind: str, op: str) -> dist.ProcessGroup:
    """A group: "gloo", "exact" and "coded" over TCP."""
    if kind == "gloo":
        return dist.new_group(backend="gloo")
    policy = f"{cases.KEYS[op]}={cases.CODEC}" if kind == "coded" else ""
    options = lc.Options(policy=policy, min_bytes=0, transport="tcp")
    return dist.new_group(backend="lowcomm", pg_options=options)


def sent_bytes(group: dist.ProcessGroup) -> int:
    """Bytes of frames that a lowcomm group has sent in ops, by its own count."""
    return sum(op["wire_bytes"] or 0 for op in lc.stats(group)[group.group_name].values())


def retransmitted(group: dist.ProcessGroup) -> int:
    """Segments that the kernel has sent again for a lowcomm group."""
    return sum(one["retransmitted"] for one in lc.connections(group)[group.group_name])


def timed(call: Callable[[], object]) -> tuple[float, float, float]:
    """When a call began and ended, and CPU seconds until all ranks are through: what is left to be sent costs CPU too."""
    cpu, start = time.process_time(), time.monotonic()
    call()
    end = time.monotonic()
    dist.barrier()
    return start, end, time.process_time() - cpu


def measure(op: str, elements: int, kinds: list[str], repetitions: int) -> list[dict[str, Any]]:
    """A row a kind of group, which take turns in every repetition; times are those of one clock, which all hosts have."""
    case = cases.make(op, dist.get_rank(), dist.get_world_size(), elements)
    groups = {kind: group_of(kind, op) for kind in kinds}
    calls = {kind: functools.partial(timed, functools.partial(case.call, group)) for kind, group in groups.items()}
    rows = {kind: {"times": [], "cpu_s": []} for kind in kinds}
    counts: dict[str, tuple[int, int]] = {}
    for repetition in range(-WARM_UP, repetitions):
        for kind, call in calls.items():
            if kind != "gloo" and repetition == 0:
                counts[kind] = sent_bytes(groups[kind]), retransmitted(groups[kind])
            case.prepare()
            dist.barrier()
            time.sleep(PAUSE_S)
            dist.barrier()
            start, end, cpu = call()
            if repetition >= 0:
                rows[kind]["times"].append((start, end))
                rows[kind]["cpu_s"].append(cpu)
    for kind, row in rows.items():
        row |= {
            "kind": kind,
            "op": op,
            "elements": elements,
            "sent_bytes": case.needed_bytes(None),
            "retransmitted": None,
        }
        if kind in counts:
            group = groups[kind]
            row["sent_bytes"] = (sent_bytes(group) - counts[kind][0]) // repetitions
            row["retransmitted"] = retransmitted(group) - counts[kind][1]
            row["congestion"] = lc.connections(group)[group.group_name][-1]["congestion"]
    for group in groups.values():
        dist.destroy_process_group(group)
    return list(rows.values())


def main() -> None:
    """Runs the job."""
    job, finish = job_of_host()
    torch.set_num_threads(1)
    if job["secret"]:
        os.environ["LOWCOMM_SECRET"] = job["secret"]
    dist.init_process_group("gloo")
    rows: list[dict[str, Any]] = []
    with busy_cores(job["busy"] if dist.get_rank() == 0 else 0):
        for op, elements, kinds in job["measures"]:
            rows += measure(op, elements, kinds, job["repetitions"])
        dist.barrier()
    finish(rows)
    leave()


if __name__ == "__main__":
    main()
