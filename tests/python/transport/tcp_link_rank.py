"""A rank on a host of a lab: sums on, and says how far it is.

Usage: tcp_link_rank.py STEPS SECONDS: of the progress deadline.
"""

import datetime
import sys

import torch
import torch.distributed as dist

import torch_lowcomm as lc

steps, seconds = int(sys.argv[1]), float(sys.argv[2])
options = lc.Options(policy="all_reduce=sym8", min_bytes=0, transport="tcp")
dist.init_process_group("lowcomm", timeout=datetime.timedelta(seconds=seconds), pg_options=options)
mine = torch.linspace(-1, 1, 1 << 16) * (dist.get_rank() + 1)
first = mine.clone()
dist.all_reduce(first)
try:
    for step in range(steps):
        again = mine.clone()
        dist.all_reduce(again)
        assert torch.equal(again, first), "another sum"
        if step % 10 == 0:
            print("step", step, flush=True)
except dist.DistBackendError as error:
    print(str(error).replace("\n", " "), flush=True)
    sys.exit(3)
print("all", flush=True)
dist.destroy_process_group()
