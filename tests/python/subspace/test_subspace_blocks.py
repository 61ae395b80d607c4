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
