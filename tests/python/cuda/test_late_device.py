"""Training on a device that does each thing as late as it may leaves, bit for bit, the weights that it leaves on the host.

Who reads what he has not waited for, or lets a copy's source go, has other weights.
"""

import fake_cuda
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

pytestmark = fake_cuda.needed

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


def _ddp(rank, device):
    import torch_lowcomm as lc

    model = DistributedDataParallel(nn.Sequential(*_layers()).to(device), bucket_cap_mb=0.001)
    model.register_comm_hook(lc.ddp.State(None, SYM), lc.ddp.hook)
    return _train(rank, model, device)


def _fsdp2(rank, device, **options):
    import torch_lowcomm as lc

    model, mesh = nn.Sequential(*_layers()).to(device), init_device_mesh(device, (2,))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    lc.fsdp.quantize(model, **options)
    return [p.to_local() for p in _train(rank, model, device)]


def _fsdp2_without_overlap(rank, device):
    return _fsdp2(rank, device, overlap=False)


def _fsdp2_over_hosts(rank, device):
    return _fsdp2(rank, device, hosts=init_device_mesh(device, (2, 1), mesh_dim_names=("hosts", "ranks")))


def _fsdp2_on_one_host(rank, device):
    return _fsdp2(rank, device, hosts=init_device_mesh(device, (1, 2), mesh_dim_names=("hosts", "ranks")))


def _two_level(rank, device):
    import torch_lowcomm as lc

    two = lc.TwoLevel(
        init_device_mesh("cpu", (2, 1), mesh_dim_names=("hosts", "ranks")), codec=SYM, inside="ranks", between="hosts"
    )
    x = _batches(rank, device)
    waiting = [two.all_reduce(one.mul_(2), dist.ReduceOp.AVG, async_op=True) for one in x]
    for one, future in zip(x, waiting, strict=True):
        future.wait()
        one.add_(1)
    return x


def _diloco(rank, device, **options):
    import torch_lowcomm as lc

    model = nn.Sequential(*_layers()).to(device)
    inner = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)
    optimizer = lc.DiLoCoX(inner, 2, model=model, codec=SYM, **options)
    return _train(rank, model, device, optimizer)


def _diloco_sync(rank, device):
    return _diloco(rank, device, mode="sync")


def _diloco_fragments(rank, device):
    return _diloco(rank, device, fragments=2)


def _quantized_adam(rank, device):
    import torch_lowcomm as lc

    model = nn.Sequential(*_layers()).to(device)
    optimizer = lc.QuantizedAdam(model.parameters(), lr=1e-2, betas=(0.5, 0.99), warmup_steps=4, codec=SYM)
    return _train(rank, model, device, optimizer)


def _pipeline(rank, device, **options):
    import torch_lowcomm as lc

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


def _pipeline_of_changes(rank, device):
    import torch_lowcomm as lc

    return _pipeline(rank, device, cache=lc.pipeline.Cache(store="fp16"))


def _messages(rank, device):
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


def _exact(rank, device):
    import torch_lowcomm as lc

    x = _batches(rank, device)
    with lc.exact():
        works = [dist.all_reduce(one.mul_(3), async_op=True) for one in x]
        for one, work in zip(x, works, strict=True):
            work.wait()
            one.add_(1)
    return x


DATA_PARALLEL = (
    _ddp,
    _fsdp2,
    _fsdp2_without_overlap,
    _fsdp2_over_hosts,
    _fsdp2_on_one_host,
    _two_level,
    _quantized_adam,
)
OTHERS = (_diloco, _diloco_sync, _diloco_fragments, _pipeline, _pipeline_of_changes, _messages, _exact)


def _compare(r, transport, trainings):
    import torch_lowcomm as lc

    fake_cuda.begin()
    for train in trainings:
        r.init("lowcomm", pg_options=lc.Options(POLICY, min_bytes=0, nccl=False, transport=transport))
        on_host, on_device = train(r.rank, "cpu"), train(r.rank, "cuda")
        for host, device in zip(on_host, on_device, strict=True):
            assert device.is_cuda, train
            assert device.detach().cpu().equal(host.detach()), train
        dist.destroy_process_group()


@pytest.mark.parametrize("transport", ["gloo", "tcp"])
@pytest.mark.parametrize("trainings", [DATA_PARALLEL, OTHERS], ids=["data parallel", "others"])
def test_the_weights_are_the_hosts(trainings, transport):
    ranks.run_ranks(_compare, 2, transport, trainings, start="spawn", env=fake_cuda.ENV)
