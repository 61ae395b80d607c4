"""One rank of the ops on links, run on every host: `python -m linklab.rank JOB.json`; writes what it measured next to it."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torch_lowcomm as lc
from linklab import cases, raw
from linklab.job import job_of_host, leave

TIMEOUT_S = 120
RAW_PORT = 29300
WARM_UP = 2
# Between two measurements: a token bucket fills in a few milliseconds, and each begins with a full one.
PAUSE_S = 0.01
GLOO, EXACT, CODED, RAW = "gloo fp32", "lowcomm exact", "lowcomm sym4", "raw exchange"
OURS = (EXACT, CODED)
_BUSY = "import os; os.nice(0)\nwhile True: pass"


def interface_sent() -> int:
    """Bytes that this host's interface has sent."""
    return _interface(8)


def interface_received() -> int:
    """Bytes that this host's interface has received."""
    return _interface(0)


def _interface(column: int) -> int:
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[column]) for line in lines if line.strip().startswith("eth0:"))


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
    """The group of a kind for an op, called by every rank."""
    if kind == GLOO:
        return dist.new_group(backend="gloo")
    coded = {"policy": f"{cases.KEYS[op]}={cases.CODEC}", "min_bytes": 0} if kind == CODED else {}
    return dist.new_group(backend="lowcomm", pg_options=lc.Options(**coded))


def counted(group: dist.ProcessGroup, kind: str) -> int | None:
    """Bytes sent in all of a lowcomm group's calls by its own count; None for gloo."""
    if kind == GLOO:
        return None
    return sum(op["wire_bytes"] or 0 for op in lc.stats(group)[group.group_name].values())


def check(case: cases.Case, kind: str, group: dist.ProcessGroup) -> dict[str, Any]:
    """One more call: its error, whether that is as it must be, and its bytes by the library's count."""
    case.output.fill_(float("nan"))
    before = counted(group, kind)
    case.prepare()
    case.call(group)
    after = counted(group, kind)
    error = ((case.output - case.exact).norm() / case.exact.norm()).item()
    if kind != CODED:
        good = error <= 1e-6 if case.sums else error == 0
    elif any(op["exact_calls"] for op in lc.stats(group)[group.group_name].values()):
        good = False
    elif case.decoded is not None:
        good = torch.equal(case.output, case.decoded)
    else:
        good = error < 0.3  # 4 bits of N(0, 1), coded twice at most, lose .2; a wrong tensor loses 1
    return {
        "counted_bytes": None if before is None or after is None else after - before,
        "relative_error": error,
        "good": bool(good),
        "crc": zlib.crc32(case.output.numpy().tobytes()) if case.same_everywhere else None,
    }


class Stretch:
    """A call's measurements: its seconds on the clock that all hosts have, CPU seconds, and the interface's bytes."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []
        self.cpu_s: list[float] = []
        self.interface_bytes: list[int] = []

    def measure(self, act: Callable[[], object], *, keep: bool) -> None:
        """Calls `act` between barriers; all ranks do."""
        dist.barrier()
        time.sleep(PAUSE_S)
        dist.barrier()
        sent, cpu, start = interface_sent(), time.process_time(), time.monotonic()
        act()
        end = time.monotonic()
        dist.barrier()  # what we sent has arrived, so that it has passed the interface; sending it has cost its CPU
        if keep:
            self.times.append((start, end))
            self.cpu_s.append(time.process_time() - cpu)
            self.interface_bytes.append(interface_sent() - sent)


def retransmitted(group: dist.ProcessGroup) -> int:
    """Segments that the kernel has sent again for a lowcomm group."""
    return sum(one["retransmitted"] for one in lc.connections(group)[group.group_name])


def measure(
    op: str, elements: int, kinds: list[str], repetitions: int, sockets: dict[int, Any]
) -> list[dict[str, Any]]:
    """A row a kind, which take turns in every repetition."""
    case = cases.make(op, dist.get_rank(), dist.get_world_size(), elements)
    groups = {kind: group_of(kind, op) for kind in kinds if kind != RAW}
    rows = {kind: check(case, kind, group) for kind, group in groups.items()}
    acts: dict[str, Callable[[], object]] = {
        kind: functools.partial(case.call, group) for kind, group in groups.items()
    }
    if RAW in kinds:
        # It moves what the coded op does: a like share to each peer that this rank sends to.
        coded = rows[CODED]["counted_bytes"] or case.needed_bytes(cases.CODEC)
        share = [(sockets[peer], coded // len(case.peers)) for peer in case.peers]
        acts[RAW] = functools.partial(raw.exchange, share)
        rows[RAW] = {"counted_bytes": coded, "relative_error": 0.0, "good": True, "crc": None}
    before = {kind: retransmitted(group) for kind, group in groups.items() if kind in OURS}
    stretches = {kind: Stretch() for kind in acts}
    for repetition in range(-WARM_UP, repetitions):
        for kind, act in acts.items():
            case.prepare()
            stretches[kind].measure(act, keep=repetition >= 0)
    for kind, row in rows.items():
        row |= {"op": op, "elements": elements, "group": kind, **vars(stretches[kind])}
        row["needed_bytes"] = case.needed_bytes(cases.CODEC if kind in (CODED, RAW) else None)
        row |= {"retransmitted": None, "congestion": None}
        if kind in OURS:
            row["retransmitted"] = retransmitted(groups[kind]) - before[kind]
            row["congestion"] = lc.connections(groups[kind])[groups[kind].group_name][-1]["congestion"]
    for group in groups.values():
        dist.destroy_process_group(group)
    return list(rows.values())


def main() -> None:
    """Measures what the job asks for."""
    warnings.filterwarnings("ignore", "`torch.distributed.*` is deprecated", FutureWarning)
    torch.set_num_threads(1)
    job, finish = job_of_host()
    if job["secret"]:
        os.environ["LOWCOMM_SECRET"] = job["secret"]
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    sockets = raw.mesh(dist.get_rank(), job["addresses"], RAW_PORT, TIMEOUT_S)
    rows: list[dict[str, Any]] = []
    with busy_cores(job["busy"] if dist.get_rank() == 0 else 0):
        for op, elements, kinds in job["measures"]:
            rows += measure(op, elements, kinds, job["repetitions"], sockets)
        dist.barrier()
    finish(rows)
    leave()


if __name__ == "__main__":
    main()
