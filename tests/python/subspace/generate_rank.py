"""A stage on a host of a lab that generates with the others, and compares each token with those of the whole decoder.

Usage: generate_rank.py, in the environment of a rank, with the folder of subspace_case on the path.
"""

import datetime

import subspace_case as case
import torch
import torch.distributed as dist

import torch_lowcomm as lc

NEW = 12
CALLS = {
    "greedy": (case.BATCH, case.TIME, {}),
    "sampled": (case.BATCH, case.TIME, {"temperature": 0.8, "seed": 3}),
    "one prompt of one token": (1, 1, {"temperature": 1.0, "seed": 4}),
}

torch.set_num_threads(1)
dist.init_process_group("lowcomm", timeout=datetime.timedelta(seconds=30))
rank, size = dist.get_rank(), dist.get_world_size()
model = case.constrained()
stage = lc.subspace.cut(model, rank, size)
for name, (batch, time, options) in CALLS.items():
    lc.reset_stats()
    ids = case.ids(batch=batch, time=time)
    tokens = lc.subspace.generate(stage, ids, max_new_tokens=NEW, **options)
    equal = torch.equal(tokens, case.by_hand(model, ids, NEW, **options))
    figures = lc.stats()[dist.group.WORLD.group_name]
    sent = sum(figure["calls"] for key, figure in figures.items() if key.startswith("send forward edge"))
    print(f"{name}: equal={equal} sent={sent}", flush=True)
dist.destroy_process_group()
