"""Small trainings on a device of the caller's choice: `f(rank, device)` on each of two ranks returns tensors to compare."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import torch_lowcomm as lc

SYM = "sym4:bucket=64"
POLICY = f"all_reduce={SYM};all_gather=minmax8:bucket=64;reduce_scatter={SYM}"
STEPS = 6


def _layers(seed=0):
    torch.manual_seed(seed)
    return [nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)]


def _batches(rank, device):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(6, 8, generator=generator).to(device) for _ in range(STEPS)]


def _train(rank, model, device, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=False)
    for x in _batches(rank, device):
        model(x).square().mean().backward()
        model(x + 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def ddp(rank, device):
    model = DistributedDataParallel(nn.Sequential(*_layers()).to(device), bucket_cap_mb=0.001)
    model.register_comm_hook(lc.ddp.State(None, SYM), lc.ddp.hook)
    return _train(rank, model, device)


def fsdp2(rank, device, **options):
    model, mesh = nn.Sequential(*_layers()).to(device), init_device_mesh(device, (2,))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    lc.fsdp.quantize(model, **options)
    return [p.to_local() for p in _train(rank, model, device)]


def fsdp2_without_overlap(rank, device):
    return fsdp2(rank, device, overlap=False)


def fsdp2_over_hosts(rank, device):
    return fsdp2(rank, device, hosts=init_device_mesh(device, (2, 1), mesh_dim_names=("hosts", "ranks")))


def fsdp2_on_one_host(rank, device):
    return fsdp2(rank, device, hosts=init_device_mesh(device, (1, 2), mesh_dim_names=("hosts", "ranks")))


def diloco(rank, device, **options):
    model = nn.Sequential(*_layers()).to(device)
    inner = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)
    optimizer = lc.DiLoCoX(inner, 2, model=model, codec=SYM, **options)
    return _train(rank, model, device, optimizer)


def diloco_sync(rank, device):
    return diloco(rank, device, mode="sync")


def diloco_fragments(rank, device):
    return diloco(rank, device, fragments=2)


def quantized_adam(rank, device):
    model = nn.Sequential(*_layers()).to(device)
    optimizer = lc.QuantizedAdam(model.parameters(), lr=1e-2, betas=(0.5, 0.99), warmup_steps=4, codec=SYM)
    return _train(rank, model, device, optimizer)


def pipeline(rank, device, **options):
    layer = _layers()[rank].to(device)
    stage = lc.pipeline.Stage(
        layer, rank, 2, torch.device(device), forward=SYM, backward="minmax8:bucket=64", **options
    )
    schedule = Schedule1F1B(stage, 3, loss_fn=lambda output, _: output.square().mean())
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-2, foreach=False)
    for x in _batches(0, device):
        numbers = range(6) if "cache" in options else None
        lc.pipeline.step(schedule, x, samples=numbers, target=x)
        optimizer.step()
        optimizer.zero_grad()
    return list(layer.parameters())


def pipeline_of_changes(rank, device):
    return pipeline(rank, device, cache=lc.pipeline.Cache(store="fp16"))


def subspace(rank, device):
    sys.path.append(str(Path(__file__).parents[2] / "examples"))
    from model import GPT, Config

    torch.manual_seed(0)
    whole = lc.subspace.constrain(GPT(Config(width=32, layers=4, heads=4, context=16)), 8)
    part = lc.subspace.cut(whole, rank, 2, coefficients="minmax8:bucket=128").to(device)
    stage = lc.pipeline.Stage(part, rank, 2, torch.device(device))
    schedule = Schedule1F1B(
        stage, 2, loss_fn=lambda y, target: nn.functional.cross_entropy(y.flatten(0, 1), target.flatten())
    )
    optimizer = lc.SubspaceAdamW(part, lr=1e-2)
    for step in range(3):
        ids = torch.randint(128, (4, 17), generator=torch.Generator().manual_seed(step)).to(device)
        x, target = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        lc.pipeline.step(schedule, x, target=target, ids=x)
        optimizer.step()
        optimizer.zero_grad()
    return list(part.parameters())


def messages(rank, device):
    x, got = _batches(rank, device), []
    for one in x:
        one.mul_(3)
        theirs = torch.zeros_like(one)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, one, 1 - rank), dist.P2POp(dist.irecv, theirs, 1 - rank)]
        ):
            work.wait()
        got.append(theirs.add_(1))
    return got


def coalesced(rank, device):
    x = _batches(rank, device)
    dist.all_reduce_coalesced([one.mul_(3) for one in x])
    return [one.add_(1) for one in x]


def exact(rank, device):
    x = _batches(rank, device)
    with lc.exact():
        works = [dist.all_reduce(one.mul_(3), async_op=True) for one in x]
        for one, work in zip(x, works, strict=True):
            work.wait()
            one.add_(1)
    return x
