"""Machines of several ranks, which FSDP2 shards: the model, one machine's optimizer, what tests read of it."""

import functools

import seed_replay_model
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_lowcomm as lc

HIDDEN = 33  # of two ranks one has a row more


class Net(nn.Module):
    """Uneven shards, a norm's vectors, and a scalar gain, of which the second rank has nothing."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.into = nn.Linear(seed_replay_model.WIDTH, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.out = nn.Linear(HIDDEN, seed_replay_model.CLUSTERS)
        self.gain = nn.Parameter(torch.ones(1))
        self.to(dtype)

    def forward(self, x):
        return self.out(torch.tanh(self.norm(self.into(x)))) * self.gain


def sharded(mesh, dtype=torch.float32):
    """The net on a mesh of one machine's ranks; the root keeps what it gathered after a forward."""
    model = Net(dtype)
    fully_shard(model.into, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def machines(r, ranks):
    """(mesh of this rank's machine, group of this rank and its like on the other machines), of `ranks` ranks a machine."""
    mesh = init_device_mesh("cpu", (r.size // ranks, ranks), mesh_dim_names=("machine", "shard"))
    return mesh["shard"], mesh["machine"].get_group()


def optimizer_of(model, **options):
    return lc.SeedReplay(model, **{"lr": 1e-2, "samples": 3, "weight_decay": 0.01, "check_every": 2, **options})


def batch_of(machine, iteration, sample):
    """The number of the batch that all ranks of a machine evaluate."""
    return 1000 * iteration + 100 * machine + sample


def step(model, optimizer, machine):
    iteration = optimizer.iteration
    return optimizer.step(lambda sample=0: seed_replay_model.loss(model, batch_of(machine, iteration, sample)))


@functools.cache
def unsharded(machines_there, iterations, **options):
    """Returns what `told` says of each machine of a run in which a machine is one rank with the whole model."""
    from ranks import run_ranks

    dtype = options.pop("dtype", torch.float32)
    return run_ranks(_whole_rank, machines_there, iterations, dtype, options)


def _whole_rank(r, iterations, dtype, options):
    r.init()
    model = Net(dtype)
    optimizer = optimizer_of(model, group=dist.group.WORLD, **options)
    losses = [step(model, optimizer, r.rank) for _ in range(iterations)]
    return told(model, optimizer, losses)


def told(model, optimizer, losses):
    """Returns what a test compares: the same of a sharded machine and of one that is not. Collective of the machine."""
    weights = {name: _whole(p).clone() for name, p in model.named_parameters()}
    return {
        "weights": weights,
        "checksum": optimizer.core.checksum(),
        "log": optimizer.core.log,
        "losses": losses,
        "stats": optimizer.stats(),
    }


def _whole(parameter):
    parameter = parameter.detach()
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def expect_equal(a, b):
    """Weights, checksums and logs of two runs, bit for bit."""
    assert a["log"] == b["log"]
    assert a["checksum"] == b["checksum"]
    assert all(torch.equal(value, b["weights"][name]) for name, value in a["weights"].items())
