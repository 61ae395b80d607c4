"""One rank of the memory measurement: `python -m diloco.memory_rank JOB.json`; no training, parameters just move."""

from __future__ import annotations

import ctypes
import math
import time
from pathlib import Path

import torch
import torch.distributed as dist
from linklab.job import job_of_host

import torch_lowcomm as lc
from diloco.cases import Case
from diloco.loops import wrapped

_SETTLED_S = 2.0  # without a change
_SAME = 1 << 20  # bytes; the reading itself allocates some


def resident(field: str = "VmRSS") -> int:
    """Bytes of this process that are in memory, or (VmHWM) were at most."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def settled() -> int:
    """Returns the bytes that stay in memory once the worker is idle and the allocator has returned its free memory."""
    last, since = -1, time.monotonic()
    while time.monotonic() - since < _SETTLED_S:
        ctypes.CDLL(None).malloc_trim(0)
        now = resident()
        if abs(now - last) > _SAME:
            last, since = now, time.monotonic()
        time.sleep(0.1)
    return last


def outer_steps(case: Case, parameters: list[torch.nn.Parameter]) -> lc.DiLoCoX:
    """A loop made and taken through two outer steps."""
    loop = wrapped(case, torch.optim.SGD(parameters, lr=0.1), every=1)
    for _ in range(2):
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(0.999)
        loop.step()
    return loop


def main() -> None:
    """Two outer steps; bytes a parameter."""
    job, finish = job_of_host()
    torch.set_num_threads(1)
    dist.init_process_group("lowcomm")
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in job["shapes"]]
    count = sum(math.prod(shape) for shape in job["shapes"])
    case = Case(**job["case"])
    outer_steps(case, [torch.nn.Parameter(torch.randn(512, 512))]).finish()  # what the first of a kind loads
    before = settled()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    loop = outer_steps(case, parameters)
    after, peak = settled(), resident("VmHWM")
    written = {"resident": (after - before) / count, "peak": (peak - before) / count}
    finish(written)
    dist.barrier()
    loop.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
