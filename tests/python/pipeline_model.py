"""A pipeline of two clusters of two stages, for the tests of lc.DiLoCoX: each rank averages with the same stage of the other."""

import ddp_model
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torch_lowcomm as lc

EVERY, HIDDEN = 3, 64


def stages():
    torch.manual_seed(7)
    first = nn.Sequential(nn.Linear(ddp_model.WIDTH, HIDDEN), nn.LayerNorm(HIDDEN), nn.ReLU())
    return nn.ModuleList([first, nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 7))])


class Pipeline:
    """One rank of it: the stage's module, and a training step's work on it."""

    def __init__(self, r):
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("clusters", "stages"))
        self.cluster, self.stage = divmod(r.rank, 2)
        self.other = 2 * self.cluster + 1 - self.stage
        self.between = self.mesh.get_group("stages")
        self.module = stages()[self.stage]

    def backward(self, step):
        x, y = ddp_model.batch(self.cluster, step)
        activations = torch.empty(len(x), HIDDEN)
        if self.stage == 0:
            activations = self.module(x)
            dist.send(activations.detach(), self.other, self.between)
            gradient = torch.empty_like(activations)
            dist.recv(gradient, self.other, self.between)
            activations.backward(gradient)
            return
        dist.recv(activations, self.other, self.between)
        activations.requires_grad_()
        (self.module(activations) - y).square().mean().backward()
        dist.send(activations.grad, self.other, self.between)

    def train(self, optimizer, steps):
        for step in steps:
            self.backward(step)
            optimizer.step()
            optimizer.zero_grad()

    def wrapped(self, every=EVERY, **options):
        """An outer loop around AdamW on the stage."""
        return lc.DiLoCoX(torch.optim.AdamW(self.module.parameters(), lr=1e-2), every, mesh=self.mesh, **options)


ADAPTIVE = {
    "codec": "sym8:bucket=64",
    "rank": 6,
    "adapt_rank": True,
    "adapt_sync_every": True,
}
