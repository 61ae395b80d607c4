"""A cache's slots are all that grows with the samples, and nothing grows with the steps."""

from pathlib import Path

import stages_case as case
import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B

STEPS, ROWS, MICRO = 3000, 8, 2
MOST = 3 << 20  # bytes that a process may grow by in two thirds of the steps; a message's 100 bytes would be 2 MB


def _resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


def _steps(r, where, steps):
    import torch_lowcomm as lc

    r.init("lowcomm")
    torch.set_num_threads(1)
    cache = lc.pipeline.Cache(**({"folder": Path(r.folder) / f"slots{r.rank}"} if where == "files" else {}))
    stage = lc.pipeline.Stage(
        case.module(r.rank), r.rank, r.size, torch.device("cpu"), forward="gauss4", backward="gauss4", cache=cache
    )
    schedule = Schedule1F1B(stage, MICRO, loss_fn=case.loss)
    x, y = (torch.stack(part) for part in zip(*case.data(), strict=True))
    before = 0
    for step in range(steps):
        at = step * ROWS % case.SAMPLES
        after = (step + 1) * ROWS % case.SAMPLES
        lc.pipeline.step(
            schedule,
            x[at : at + ROWS],
            target=y[at : at + ROWS],
            samples=range(at, at + ROWS),
            next_samples=range(after, after + ROWS),
        )
        if step == steps // 3:
            before = _resident()
    grown = _resident() - before
    assert cache.bytes == case.SAMPLES * 3 * case.WIDTH * 2
    assert grown < MOST * max(1, steps / STEPS), f"{grown} bytes in {steps - steps // 3} steps"
    dist.destroy_process_group()
    return grown


def test_nothing_grows_with_the_steps(pair):
    pair(_steps, "ram", STEPS, timeout=180)


def test_nothing_grows_with_the_steps_in_files(pair):
    pair(_steps, "files", STEPS // 2, timeout=180)
