"""A saved state that was damaged or edited is refused by every optimizer of ours, and changes nothing."""

import copy

import diloco_model
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_lowcomm as lc


def _trained(optimizer_of):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    made = optimizer_of(model)
    for _ in range(6):
        model(torch.randn(4, 64)).square().mean().backward()
        made.step()
        made.zero_grad()
    return made


def _diloco():
    return _trained(lambda m: lc.DiLoCoX(torch.optim.AdamW(m.parameters()), 2, model=m, codec="gauss4", rank=4))


def _adam():
    return _trained(lambda m: lc.QuantizedAdam(m.parameters(), lr=1e-3, warmup_steps=3))


def _ddp():
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    parallel = DistributedDataParallel(model)
    state = lc.ddp.State(codec="gauss4", rank=4, model=model)
    parallel.register_comm_hook(state, lc.ddp.hook)
    for _ in range(3):
        parallel(torch.randn(4, 64)).square().mean().backward()
    return state


KINDS = {"DiLoCoX": _diloco, "QuantizedAdam": _adam, "ddp.State": _ddp}


def _leaves(value, path=()):
    """Where tensors, bytes and floats are in a nest."""
    if isinstance(value, dict):
        return [leaf for key in value for leaf in _leaves(value[key], (*path, key))]
    if isinstance(value, list):
        return [leaf for i, item in enumerate(value) for leaf in _leaves(item, (*path, i))]
    return [path] if isinstance(value, torch.Tensor | bytes) else []


def _damages(leaf):
    """Damaged copies of a tensor or bytes, by what was done to them."""
    if isinstance(leaf, bytes):
        middle = len(leaf) // 2
        return {
            "a flipped bit": leaf[:middle] + bytes([leaf[middle] ^ 1]) + leaf[middle + 1 :],
            "half of it": leaf[:middle],
        }
    made = {"None": None}
    if leaf.numel() and leaf.element_size() > 0:
        flipped = leaf.clone()
        flipped.view(-1).view(torch.uint8)[0] ^= 1
        made["a flipped bit"] = flipped
    if leaf.is_floating_point() and leaf.numel():
        made["NaN"] = torch.full_like(leaf, torch.nan)
    return made


def _put(state, path, value):
    damaged = copy.deepcopy(state)
    at = damaged
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return damaged


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_state_is_refused_whole(group, kind):
    made = KINDS[kind]()
    saved = copy.deepcopy(made.state_dict())
    tried = 0
    for path in _leaves(saved):
        leaf = saved
        for key in path:
            leaf = leaf[key]
        for how, damaged in _damages(leaf).items():
            with pytest.raises(ValueError):
                made.load_state_dict(_put(saved, path, damaged))
                pytest.fail(f"{path}: {how}")
            assert not diloco_model.differing(made.state_dict(), saved), (path, how)
            tried += 1
    assert tried >= 6
    made.load_state_dict(saved)
    assert not diloco_model.differing(made.state_dict(), saved)
