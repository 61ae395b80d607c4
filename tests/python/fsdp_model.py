"""The small FSDP2 model that the tests of lc.fsdp share, and how they train and read it."""

import copy
import os
import signal
import zlib

import pytest
import torch
import torch.distributed as dist
from collective_cases import bits
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

WIDTH = 64


class Spy(torch.autograd.Function):
    """A product that notes the weight it saw, in forward and again in backward."""

    seen = ()

    @staticmethod
    def forward(ctx, x, weight, name):
        ctx.save_for_backward(x, weight)
        ctx.name = name
        Spy.seen.append(("forward", name, weight.detach().clone()))
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        Spy.seen.append(("backward", ctx.name, weight.detach().clone()))
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2), None


class Block(nn.Module):
    """A big weight, a bias, a norm, a small matrix: only the first is coded."""

    def __init__(self, name, spied=False, checkpointed=False):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.big = nn.Linear(WIDTH, 4 * WIDTH)
        self.back = nn.Linear(4 * WIDTH, WIDTH)
        self.small = nn.Linear(WIDTH, 6)
        self.name, self.spied, self.checkpointed = name, spied, checkpointed

    def body(self, x):
        h = self.norm(x)
        h = Spy.apply(h, self.big.weight, self.name) + self.big.bias if self.spied else self.big(h)
        return x + self.back(torch.relu(h)) + self.small(x).sum(-1, keepdim=True)

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)


CODED = ("big.weight", "back.weight")


def make_model(blocks=2, *, mesh=None, **kwargs):
    policy = kwargs.pop("mp_policy", None)
    torch.manual_seed(7)
    model = nn.Sequential(*[Block(f"block{k}", **kwargs) for k in range(blocks)])
    if mesh is not None:
        more = {"mp_policy": policy} if policy else {}
        for block in model:
            fully_shard(block, mesh=mesh, **more)
        fully_shard(model, mesh=mesh, **more)
    return model


def batch(rank, step):
    g = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(4, WIDTH, generator=g)


def loss_of(model, x):
    return (model(x).float() - x.roll(1, -1)).square().mean()


def train(r, model, steps, accumulate=1, lr=3e-3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        for k in range(accumulate):
            loss = loss_of(model, batch(r.rank, step * accumulate + k))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def wrapped(model):
    """What fully_shard was called on, of a model."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def gathered(model):
    """Every parameter as this rank computes with it."""
    for module in wrapped(model):
        module.unshard()
    seen = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert not any(isinstance(p, DTensor) for p in seen.values())
    for module in wrapped(model):
        module.reshard()
    return seen


def crc(tensors):
    """By which ranks compare what they have."""
    return zlib.crc32(b"".join(bits(t.detach().contiguous()).numpy().tobytes() for t in tensors))


def whole(model):
    return {k: p.full_tensor().detach().clone() for k, p in model.named_parameters()}


def shards_of(r, model):
    """Every rank's shard of every parameter: {name: [rank]}."""
    mine = {name: p.to_local().detach().clone() for name, p in model.named_parameters()}
    everyone = [None] * r.size
    dist.all_gather_object(everyone, mine)  # uneven ones too
    return {name: [theirs[name] for theirs in everyone] for name in mine}


def steps(r, model, optimizer, numbers):
    """The losses of steps with these numbers, each on a batch of its own."""
    losses = []
    for step in numbers:
        loss = loss_of(model, batch(r.rank, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def expect_resumed(r, make, visit=lambda model, comms: None, comms_first=False):
    """The last three of six steps are those of a run that goes on from a checkpoint.

    Args:
        make: Returns (model, comms, optimizer).
        visit: Called before the checkpoint is taken.
        comms_first: Whether comms' state is loaded before the model's.

    Returns:
        The losses.
    """
    r.init("lowcomm")
    model, comms, optimizer = make()
    first = steps(r, model, optimizer, range(3))
    visit(model, comms)
    weights, moments = copy.deepcopy(get_state_dict(model, optimizer))
    state = comms.state_dict()
    rest = steps(r, model, optimizer, range(3, 6))
    trained = shards_of(r, model)

    dist.destroy_process_group()  # as in a fresh process: slots are given out anew
    r.init("lowcomm")
    again, its_comms, its_optimizer = make()
    if comms_first:
        its_comms.load_state_dict(state)
    # Fills a fresh optimizer's state by a step at learning rate 0, which counts as none.
    get_state_dict(again, its_optimizer)
    set_state_dict(again, its_optimizer, model_state_dict=weights, optim_state_dict=moments)
    if not comms_first:
        its_comms.load_state_dict(state)
    assert steps(r, again, its_optimizer, range(3, 6)) == rest
    for name, shards in shards_of(r, again).items():
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(shards, trained[name], strict=True)), name
    return first + rest


def expect_lost(r, model, culprit, named):
    """In a backward pass the culprit is killed at a block in the middle; the others' error matches `named`."""
    if r.rank == culprit:
        model[1].back.register_full_backward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(dist.DistBackendError, match=named):
        for step in range(3):
            loss_of(model, batch(r.rank, step)).backward()
