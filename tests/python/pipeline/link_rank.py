"""A stage on a host of a lab, which takes steps until its link fails: exit status 3 with the error as its last line."""

import datetime
import sys

import stages_case as case
import torch
import torch.distributed as dist

import torch_lowcomm as lc

torch.set_num_threads(1)
dist.init_process_group("lowcomm", timeout=datetime.timedelta(seconds=5))
rank = dist.get_rank()
cache = lc.pipeline.Cache()
schedule, _ = case.build(rank, 2, "1F1B", cache=cache, forward="gauss4", backward="gauss4")
x, y = (torch.stack(part) for part in zip(*case.data()[: case.ROWS], strict=True))
try:
    for number in range(1_000_000):
        lc.pipeline.step(schedule, x, samples=range(case.ROWS), target=y)
        if number % 10 == 0:
            print("step", number, flush=True)
except dist.DistBackendError as error:
    print(f"rank {rank}: {error}".replace("\n", " "), flush=True)
    sys.exit(3)
