"""A model made data parallel the way a case says."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_lowcomm as lc
from steps.cases import Case

# One bucket for everything: what torch's PowerSGD needs, whose buckets are made anew after the first step, and what is
# best for factors, of which the second waits for the first.
_ONE_BUCKET_MB = 10_000


def ddp(case: Case, model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """DDP with the case's hook; buffers, which never change, are not sent along."""
    bucket_mb = _ONE_BUCKET_MB if case.rank else 25
    wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=bucket_mb, broadcast_buffers=False)
    if case.hook == "fp16":
        wrapped.register_comm_hook(group, default_hooks.fp16_compress_hook)
    elif case.hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=case.rank, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif case.hook == "lowcomm":
        state = lc.ddp.State(group, codec=case.codec, rank=case.rank)
        wrapped.register_comm_hook(state, lc.ddp.hook)
    return wrapped


def fsdp(case: Case, model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """FSDP2, a block a wrapped module, quantized where the case says so."""
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if case.weights:
        lc.fsdp.quantize(model, weights=case.weights, gradients=case.gradients)
    return model


WRAP = {"ddp": ddp, "fsdp": fsdp}
