"""Ops without a codec on device tensors, which go by way of the host, as integers do under any policy."""

import time

import torch
import torch.distributed as dist

N = 10_000


def exact(t):
    t.init()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = torch.arange(N, device=t.device).remainder(100).to(dtype)
        expected = 2 * x
        work = dist.all_reduce(x, async_op=True)
        while not work.is_completed():
            time.sleep(0.001)
        work.wait()
        assert x.equal(expected), dtype
        both = torch.empty(2 * N, device=t.device, dtype=dtype)
        dist.all_gather_into_tensor(both, x)
        assert both.equal(torch.cat([expected, expected])), dtype
    said = [None] * t.size
    dist.all_gather_object(said, {"rank": t.rank})
    assert said == [{"rank": rank} for rank in range(t.size)], said
    dist.barrier()
