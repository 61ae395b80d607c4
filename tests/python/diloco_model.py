"""The small model that the tests of lc.DiLoCoX's checkpoints and faults share, and all that a run ends with."""

import copy
import io

import ddp_model
import torch
import torch.distributed as dist
from torch import nn

import torch_lowcomm as lc

EVERY = 4


class Net(ddp_model.Net):
    """With running means."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2 * ddp_model.WIDTH)


def fresh(every=EVERY, **options):
    torch.manual_seed(7)
    model = Net()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, lc.DiLoCoX(inner, every, model=model, **options)


def train(model, optimizer, rank, numbers):
    """Steps with these numbers; their losses."""
    return ddp_model.train(model, rank, len(numbers), first=numbers.start, optimizer=optimizer, spare=True)


def ended(model, optimizer):
    with optimizer.outer_parameters():
        outer = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = optimizer.state_dict()
    own = state["param_groups"][0][f"rank{dist.get_rank()}"]
    for key in ("packed", "inner"):  # low-rank factors, and the inner optimizer's state
        own[key] = torch.load(io.BytesIO(own[key]))
    return {"own": copy.deepcopy(model.state_dict()), "outer": outer, "state": copy.deepcopy(state)}


def differing(a, b, path=""):
    """Where two nests of containers and tensors are unlike."""
    if isinstance(a, torch.Tensor):
        return [] if isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b) else [path]
    if isinstance(a, dict):
        if not isinstance(b, dict) or a.keys() != b.keys():
            return [path]
        return [d for key in a for d in differing(a[key], b[key], f"{path}.{key}")]
    if isinstance(a, list | tuple):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differing(x, y, f"{path}.{i}")]
    return [] if a == b else [path]
