"""A cache's slots are all that grows with the samples, and nothing grows with the steps.

    LOWCOMM_TEST_STEPS=10000 python -m pytest -s tests/python/pipeline/test_pipeline_memory.py

takes more steps than a test has time for, and prints by how much each rank has grown.
"""

import os
from pathlib import Path

import pytest
import stages_case as case
import torch

import torch_lowcomm as lc

STEPS, ROWS, MICRO = int(os.environ.get("LOWCOMM_TEST_STEPS", "1000")), 8, 2
MOST = 3 << 20  # bytes that a process may grow by in two thirds of the steps


def _resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["ram", "files"])
@pytest.mark.on("pair", group={}, timeout=180 * max(1, STEPS / 1000))
def test_nothing_grows_with_the_steps(r, where):
    cache = lc.pipeline.Cache(**({"folder": Path(r.folder) / f"slots{r.rank}"} if where == "files" else {}))
    coded = {"forward": "gauss4", "backward": "gauss4", "cache": cache}
    schedule, _ = case.build(r.rank, r.size, "1F1B", micro=MICRO, **coded)
    x, y = (torch.stack(part) for part in zip(*case.data(), strict=True))
    before = 0
    for step in range(STEPS):
        at = step * ROWS % case.SAMPLES
        after = (step + 1) * ROWS % case.SAMPLES
        cache.read_ahead(range(after, after + ROWS))
        lc.pipeline.step(schedule, x[at : at + ROWS], target=y[at : at + ROWS], samples=range(at, at + ROWS))
        if step == STEPS // 3:
            before = _resident()
    grown = _resident() - before
    assert cache.bytes == case.SAMPLES * 3 * case.WIDTH * 2
    print(f"{where}: rank {r.rank} grown by {grown} bytes in {STEPS - STEPS // 3} steps")
    assert grown < MOST
