"""A group of one rank with NCCL: what the backend asks of NCCL's Works, which a group of host tensors never does."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torch_lowcomm as lc
from gpu_check.trial import GivenGradients


def nccl_one(t):
    t.alone(nccl=t.cuda)
    x = torch.arange(1000.0, device=t.device)
    expected = x.clone()
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    assert work.get_future().wait()[0].equal(expected)
    dist.all_reduce_coalesced([x, x + 1])
    with dist._coalescing_manager(async_ops=True) as block:
        dist.all_reduce(x)
        dist.all_reduce(x)
    block.wait()
    dist.barrier()
    t.synchronize()
    assert x.equal(expected)
    model = DistributedDataParallel(GivenGradients((64, 64), (64,)).to(t.device))
    model.register_comm_hook(lc.ddp.State(), lc.ddp.hook)
    model(0, 0).backward()
    t.synchronize()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    return {"inner": "nccl" if t.cuda else "none"}
