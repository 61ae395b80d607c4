"""lc.subspace.check of what a block does to the residual stream, today and once it has been trained."""

import pytest
import subspace_case as case
import torch
from torch import nn

import torch_lowcomm as lc


class _Sum(nn.Module):
    """A block whose sums are a function of the stream, of what is added, and of a trained parameter."""

    def __init__(self, block, add, trained):
        super().__init__()
        self.attention, self.attention_norm, self.mlp_norm = block.attention, block.attention_norm, block.mlp_norm
        self.up, self.down, self.add, self.trained = block.up, block.down, add, nn.Parameter(trained)

    def forward(self, x):
        x = self.add(x, self.attention(self.attention_norm(x)), self.trained)
        return self.add(x, self.down(nn.functional.gelu(self.up(self.mlp_norm(x)))), self.trained)


_ONES = torch.ones(1, 1, case.WIDTH, dtype=torch.float64)
SUMS = {
    "a norm without a gain behind the sum": (
        lambda x, y, _: nn.functional.rms_norm(x + y, (case.WIDTH,)),
        _ONES,
        r"it multiplies the residual stream by 0\.\d+ to 1\.\d+",
    ),
    "a scaled stream": (lambda x, y, _: 0.9 * x + y, _ONES, r"it multiplies the residual stream by 0\.81 \("),
    "a trained scale of the stream": (
        lambda x, y, g: g * x + y,
        _ONES[..., :1],
        "it multiplies the residual stream by",
    ),
    "a gain of three dimensions": (lambda x, y, g: x + g * y, _ONES, "of its output is outside the subspace: a gain"),
    "a bias of zeros": (lambda x, y, g: x + y + g, 0 * _ONES, "of its output is outside the subspace: a gain"),
}


@pytest.mark.parametrize("what", SUMS)
def test_a_sum_that_leaves_the_subspace_in_training(what):
    """Refused though its boundaries may be exact today: the parameter is 1 or 0 as the block is made."""
    add, trained, message = SUMS[what]
    model = case.gpt()
    model.blocks[1] = _Sum(model.blocks[1], add, trained)
    with pytest.raises(ValueError, match=f"blocks.1: .*{message}") as error:
        lc.subspace.constrain(model, case.RANK)
    assert "blocks.0" not in str(error.value) and torch.equal(model.blocks[1].trained, trained)
    model.blocks[1].add = lambda x, y, g: x + g.mean() * y  # any factor of what is added is in the subspace
    assert lc.subspace.check(lc.subspace.constrain(model, case.RANK)) == []


def _alias(block):
    block.output = block.attention.out


def _alias_of_the_other(block):
    block.attention.out = block.down = nn.Linear(case.WIDTH, case.WIDTH, bias=False, dtype=torch.float64)
    block.up = nn.Linear(case.WIDTH, case.WIDTH, bias=False, dtype=torch.float64)


def _weight_of_another_module(block):
    block.other = nn.Linear(case.WIDTH, case.WIDTH, bias=False)
    block.other.weight = block.attention.out.weight


@pytest.mark.parametrize("change", [lambda model: model, lc.subspace.reparam], ids=["weights", "coordinates"])
def test_a_projection_under_two_names_of_its_block(change):
    """It is one module and not tied: constrained, trained, saved and loaded as under one."""
    model, ids = case.gpt(), case.ids()
    _alias(model.blocks[1])
    model = change(lc.subspace.constrain(model, case.RANK))
    assert lc.subspace.check(model) == []
    plain = change(case.constrained())
    for decoder in (model, plain):
        optimizer = lc.SubspaceAdamW(decoder, lr=1e-2)
        for _ in range(2):
            decoder(ids, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(model(ids, ids), plain(ids, ids))
    merged = lc.subspace.merge_states([stage.state_dict() for stage in case.cuts(model, 2)])
    other = case.gpt()
    _alias(other.blocks[1])
    other = change(lc.subspace.constrain(other, case.RANK))
    for stage in case.cuts(other, 3):
        stage.load_state_dict(merged)
    assert torch.equal(other(ids, ids), model(ids, ids))


TIED = {
    "both projections": (_alias_of_the_other, r"blocks.1.attention.out.weight: tied to blocks.1.down.weight"),
    "another module": (_weight_of_another_module, r"blocks.1.attention.out.weight: tied to blocks.1.other.weight"),
}


@pytest.mark.parametrize("what", TIED)
def test_a_weight_of_two_modules_is_tied(what):
    tie, message = TIED[what]
    model = case.gpt()
    tie(model.blocks[1])
    with pytest.raises(ValueError, match=message):
        lc.subspace.constrain(model, case.RANK)


class _Masked(nn.Module):
    """A block that needs more than activations."""

    def __init__(self, block):
        super().__init__()
        self.attention, self.down, self.block = block.attention, block.down, block

    def forward(self, x, mask):
        return self.block(x) * mask


def test_a_block_that_needs_another_argument_is_named():
    model = case.gpt()
    model.blocks[2] = _Masked(model.blocks[2])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"blocks.2: does not run as a stage calls it.*TypeError.*'mask'") as error:
        lc.subspace.constrain(model, case.RANK)
    assert "blocks.1" not in str(error.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
