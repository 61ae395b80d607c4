"""A rank on a host of a lab: sums on, and says how far it is.

Usage: tcp_link_rank.py STEPS SECONDS [ELEMENTS]: seconds of the progress deadline.
"""

import datetime
import sys

import torch
import torch.distributed as dist

import torch_lowcomm as lc

steps, seconds = int(sys.argv[1]), float(sys.argv[2])
options = lc.Options(policy="all_reduce=sym8", min_bytes=0)
dist.init_process_group("lowcomm", timeout=datetime.timedelta(seconds=seconds), pg_options=options)
mine = torch.linspace(-1, 1, int(sys.argv[3]) if len(sys.argv) > 3 else 1 << 16) * (dist.get_rank() + 1)
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
(connections,) = lc.connections().values()
bulk = [one for one in connections if one["lane"].startswith("bulk")]
print(f"all, over {sum(one['sent_bytes'] > 10_000 for one in bulk)} of {len(bulk)} bulk connections", flush=True)
dist.destroy_process_group()
