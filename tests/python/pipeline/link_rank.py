"""A stage on a host of a lab. It takes steps until its link fails and says how, and in a new group once the link is mended.

Usage: link_rank.py FOLDER, which all hosts see; the file `mended` in it says that the link works again.
"""

import datetime
import os
import sys
import time
from pathlib import Path

import stages_case as case
import torch
import torch.distributed as dist

import torch_lowcomm as lc

torch.set_num_threads(1)
folder = Path(sys.argv[1])
cache = lc.pipeline.Cache()
x, y = (torch.stack(part) for part in zip(*case.data()[: case.ROWS], strict=True))


def begin(seconds, **how):
    dist.init_process_group("lowcomm", timeout=datetime.timedelta(seconds=seconds), **how)
    return case.build(rank, 2, "1F1B", cache=cache, forward="gauss4", backward="gauss4")[0]


def step(schedule):
    lc.pipeline.step(schedule, x, samples=range(case.ROWS), target=y)


rank = int(os.environ["RANK"])
schedule = begin(5)
try:
    for number in range(1_000_000):
        step(schedule)
        if number % 10 == 0:
            print("step", number, flush=True)
except dist.DistBackendError as error:
    print(f"rank {rank}: {error}".replace("\n", " "), flush=True)
else:
    sys.exit("the link did not fail")
dist.destroy_process_group()
while not (folder / "mended").exists():  # until the test's deadline
    time.sleep(0.05)
schedule = begin(60, init_method=f"file://{folder}/store", rank=rank, world_size=2)
step(schedule)
step(schedule)
sides = [None, None]
dist.all_gather_object(sides, cache.slots.rows(0, rank == 0).tolist())
forgotten = cache.stats()["forgotten"]
print(f"equal={sides[0] == sides[1]} slots={len(sides[0])} forgotten={forgotten}", flush=True)
dist.destroy_process_group()
