"""The integrations that train models, on gloo and then on lowcomm in the same processes.

No sum has more than two terms: every tensor is bit-equal to gloo's.
"""

import pytest
import torch
from collective_cases import bits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

STEPS = 4
WIDTH = 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def _model(blocks=3):
    torch.manual_seed(1)
    return nn.Sequential(*[Block() for _ in range(blocks)], nn.Linear(WIDTH, 3))


def _batch(rank, step, rows=8):
    g = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(rows, WIDTH, generator=g), torch.randint(0, 3, (rows,), generator=g)


def _train(model, rank):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        x, y = _batch(rank, step)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def _whole(module):
    """Every parameter and buffer, put together from its shards."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {k: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for k, t in state.items()}


# Each trains on the world it finds and returns {name: tensor}.


def ddp_options(r):
    """Accumulation, unused parameters, views of buckets, buffers."""
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3))
    torch.manual_seed(2)
    for p in net.parameters():
        nn.init.normal_(p, std=0.2)
    unused = nn.ModuleDict({"used": net, "unused": nn.Linear(2, 2)})
    unused.forward = net.forward
    model = DistributedDataParallel(unused, find_unused_parameters=True, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        with model.no_sync():
            x, y = _batch(r.rank, 2 * step)
            nn.functional.cross_entropy(model(x), y).backward()
        x, y = _batch(r.rank, 2 * step + 1)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return _whole(net)


def sequence_parallel(r):
    """Each rank holds rows of the activations: gathered before the first product, reduce-scattered after the second."""
    mesh = init_device_mesh("cpu", (r.size,))
    model = _model()
    plan = {"up": ColwiseParallel(input_layouts=Shard(0)), "down": RowwiseParallel(output_layouts=Shard(0))}
    for block in model[:-1]:
        parallelize_module(block, mesh, plan)
    losses = _train(model, r.rank)
    return {"losses": torch.stack(losses), **_whole(model)}


def two_dimensions(r):
    mesh = init_device_mesh("cpu", (2, r.size // 2), mesh_dim_names=("dp", "tp"))
    model = _model()
    for block in model[:-1]:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for block in model[:-1]:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    losses = _train(model, mesh["dp"].get_local_rank())
    return {"losses": torch.stack(losses), **_whole(model)}


def _run(r, recipe, backend):
    r.init(backend)
    return recipe(r)


@pytest.mark.later
@pytest.mark.parametrize(
    ("size", "recipe"),
    [(2, ddp_options), (2, sequence_parallel), (4, two_dimensions)],
    ids=lambda f: getattr(f, "__name__", f),
)
def test_ranks_train_to_gloos_bits(pair, quad, size, recipe):
    pool = {2: pair, 4: quad}[size]
    wanted = pool(_run, recipe, "gloo", timeout=90)
    got = pool(_run, recipe, "lowcomm", timeout=90)
    for rank, (theirs, ours) in enumerate(zip(wanted, got, strict=True)):
        assert theirs.keys() == ours.keys()
        for name, want in theirs.items():
            assert torch.equal(bits(want), bits(ours[name])), f"rank {rank}: {name}: {ours[name]} for {want}"
