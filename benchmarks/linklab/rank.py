"""One rank of the standard set, run on every host: `python -m linklab.rank JOB.json`; writes what it measured next to it."""

from __future__ import annotations

import time
import warnings
import zlib
from collections.abc import Callable
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
# Between two measurements: a token bucket fills in a few milliseconds, and each begins with a full one.
PAUSE_S = 0.01
GLOO, EXACT, CODED, RAW = "gloo fp32", "lowcomm exact", "lowcomm sym4", "raw exchange"
EXACT_TCP, CODED_TCP = "exact over tcp", "sym4 over tcp"
COUNTED, CODES = (EXACT, CODED, EXACT_TCP, CODED_TCP), (CODED, CODED_TCP)


def interface_sent() -> int:
    """Bytes that this host's interface has sent."""
    return _interface(8)


def interface_received() -> int:
    """Bytes that this host's interface has received."""
    return _interface(0)


def _interface(column: int) -> int:
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[column]) for line in lines if line.strip().startswith("eth0:"))


def counted(group: dist.ProcessGroup, name: str) -> int | None:
    """Bytes sent in all of a lowcomm group's calls by its own count; None where another backend carried any."""
    if name not in COUNTED:
        return None
    ops = lc.stats(group)[group.group_name].values()
    if any(op["calls"] and op["wire_bytes"] is None for op in ops):
        return None
    return sum(op["wire_bytes"] or 0 for op in ops)


def went_exact(group: dist.ProcessGroup) -> str | None:
    """Why a group that should compress did not, or None."""
    for op, stats in lc.stats(group)[group.group_name].items():
        if stats["exact_calls"]:
            return f"{op} went exact: {stats['exact_because'] or 'no reason given'}"
    return None


def groups_of(key: str, ranks: list[int]) -> tuple[dict[str, dist.ProcessGroup], str | None]:
    """An op's three groups (called by every rank of the world), and why there is none that compresses it, if so."""
    groups = {GLOO: dist.new_group(ranks, backend="gloo")}
    for name, transport in ((EXACT, "gloo"), (EXACT_TCP, "tcp")):
        groups[name] = dist.new_group(ranks, backend="lowcomm", pg_options=lc.Options(transport=transport))
    for name, transport in ((CODED, "gloo"), (CODED_TCP, "tcp")):
        try:
            options = lc.Options(policy=f"{key}={cases.CODEC}", min_bytes=0, transport=transport)
        except ValueError as error:
            return groups, str(error)
        groups[name] = dist.new_group(ranks, backend="lowcomm", pg_options=options)
    return groups, None


class Stretch:
    """A call's measurements: its seconds on every clock alike (one machine has one), and the interface's bytes."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []
        self.interface: list[int] = []

    def measure(self, act: Callable[[], object], *, keep: bool) -> None:
        """Calls `act` between barriers; all ranks do."""
        dist.barrier()
        time.sleep(PAUSE_S)
        dist.barrier()
        before = interface_sent()
        start = time.monotonic()
        act()
        end = time.monotonic()
        dist.barrier()  # what we sent has arrived, so that it has passed the interface
        if keep:
            self.times.append((start, end))
            self.interface.append(interface_sent() - before)


def check(case: cases.Case, name: str, group: dist.ProcessGroup) -> dict[str, Any]:
    """One more call: its error, whether that is as it must be, and its bytes by the library's count."""
    case.output.fill_(float("nan"))
    before = counted(group, name)
    case.prepare()
    case.call(group)
    after = counted(group, name)
    error = ((case.output - case.exact).norm() / case.exact.norm()).item()
    if name not in CODES:
        good = error <= 1e-6 if case.sums else error == 0
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


def measure(op: str, elements: int, repetitions: int, warm_up: int, sockets: dict[int, Any]) -> list[dict[str, Any]]:
    """All rows of an op: its groups and the raw exchange in turn within every repetition."""
    rank, size = dist.get_rank(), dist.get_world_size()
    case = cases.make(op, rank, size, elements)
    groups, refused = groups_of(cases.KEYS[op], list(range(size)))
    rows = {name: check(case, name, group) for name, group in groups.items()}
    if refused is None and (why := went_exact(groups[CODED])):
        refused = why
        for name in CODES:
            del groups[name], rows[name]
    # The raw exchange moves what the coded op does, or would: a like share to each peer that this rank sends to.
    coded = rows.get(CODED, {}).get("counted_bytes") or case.needed_bytes(cases.CODEC)
    share = [(sockets[peer], coded // len(case.peers)) for peer in case.peers]
    acts: dict[str, Callable[[], object]] = {
        name: (lambda group=group: case.call(group)) for name, group in groups.items()
    }
    acts[RAW] = lambda: raw.exchange(share)
    stretches = {name: Stretch() for name in acts}
    for repetition in range(-warm_up, repetitions):
        for name, act in acts.items():
            case.prepare()
            stretches[name].measure(act, keep=repetition >= 0)
    rows[RAW] = {"counted_bytes": coded, "relative_error": 0.0, "good": True, "crc": None}
    for name, row in rows.items():
        row |= {"op": op, "group": name, "times": stretches[name].times, "interface_bytes": stretches[name].interface}
        row["needed_bytes"] = case.needed_bytes(cases.CODEC if name in (*CODES, RAW) else None)
    if refused is not None:
        rows[CODED] = {"op": op, "group": CODED, "refused": refused}
    for group in groups.values():
        dist.destroy_process_group(group)
    return list(rows.values())


def main() -> None:
    """Measures what the job asks for."""
    warnings.filterwarnings("ignore", "`torch.distributed.*` is deprecated", FutureWarning)
    torch.set_num_threads(1)
    job, finish = job_of_host()
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    sockets = raw.mesh(dist.get_rank(), job["addresses"], RAW_PORT, TIMEOUT_S)
    options = job["elements"], job["repetitions"], job["warm_up"], sockets
    finish([row for op in cases.KEYS for row in measure(op, *options)])
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
