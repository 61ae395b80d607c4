"""A cache's slots are all that grows with the samples, and nothing grows with the steps.

    LOWCOMM_TEST_STEPS=10000 python -m pytest -s tests/python/pipeline/test_pipeline_memory.py

takes more steps than a test has time for, and prints by how much each rank has grown.
"""

import os
from pathlib import Path

import pytest
import stages_case as case
import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B

STEPS, ROWS, MICRO = int(os.environ.get("LOWCOMM_TEST_STEPS", "3000")), 8, 2
MOST = (
    3 << 20
)  # bytes that a process may grow by in two thirds of the steps; of 3,000, a message's 100 bytes would be 2 MB


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
    assert grown < MOST, f"{grown} bytes in {steps - steps // 3} steps"
    dist.destroy_process_group()
    return grown


def _expect_no_growth(pair, where, steps):
    grown = pair(_steps, where, steps, timeout=180 * max(1, STEPS / 3000))
    print(f"{where}: grown by {grown} bytes in {steps - steps // 3} steps")


@pytest.mark.slow
def test_nothing_grows_with_the_steps(pair):
    _expect_no_growth(pair, "ram", STEPS)


@pytest.mark.slow
def test_nothing_grows_with_the_steps_in_files(pair):
    _expect_no_growth(pair, "files", STEPS // 2)
