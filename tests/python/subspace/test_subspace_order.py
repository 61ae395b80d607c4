"""lc.subspace.check of what a decoder computes: its embedding, blocks, norm and head, one after the other, or something else."""

import logging
import re

import pytest
import subspace_case as case
import torch
from torch import nn

import torch_lowcomm as lc


class _InPlace(nn.Module):
    """A block that writes to its input."""

    def __init__(self, block):
        super().__init__()
        self.attention_norm, self.attention, self.mlp_norm = block.attention_norm, block.attention, block.mlp_norm
        self.up, self.down = block.up, block.down

    def forward(self, x):
        x += self.attention(self.attention_norm(x))
        x += self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))
        return x


class _Gated(_InPlace):
    """A block that another tensor conditions."""

    def forward(self, x, gate=1.0):
        x = x + gate * self.attention(self.attention_norm(x))
        return x + gate * self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))


class _Decoder(nn.Module):
    """A decoder whose forward is a function of its parts."""

    def __init__(self, forward, wrap=lambda block: block):
        super().__init__()
        whole = case.gpt()
        self.embed, self.norm, self.head = whole.embed, whole.norm, whole.head
        self.blocks = nn.ModuleList(wrap(block) for block in whole.blocks)
        self.function = forward

    def forward(self, ids):
        return self.function(self, self.embed(ids))


def _chain(blocks, x):
    for block in blocks:
        x = block(x)
    return x


def _skip(m, x):
    return m.head(m.norm(_chain([m.blocks[0], m.blocks[1], m.blocks[3]], x)))


def _loop(m, x):
    return m.head(m.norm(_chain([*m.blocks, m.blocks[3]], x)))


def _swap(m, x):
    return m.head(m.norm(_chain([m.blocks[i] for i in (0, 2, 1, 3)], x)))


def _between(m, x):
    x = m.blocks[1](m.blocks[0](x))
    return m.head(m.norm(_chain(m.blocks[2:], 0.5 * x)))


def _skip_connection(m, x):
    return m.head(m.norm(m.blocks[3](m.blocks[2](first := m.blocks[0](x)) + m.blocks[1](first) - first)))


def _gate(m, x):
    x = m.blocks[2](m.blocks[1](m.blocks[0](x)), gate=0.5)
    return m.head(m.norm(m.blocks[3](x)))


def _before_the_norm(m, x):
    return m.head(m.norm(_chain(m.blocks, x) + x))


def _no_norm(m, x):
    return m.head(_chain(m.blocks, x))


def _of_functions(m, x):
    x = nn.functional.rms_norm(_chain(m.blocks, x), (case.WIDTH,), m.norm.weight, m.norm.eps)
    return nn.functional.linear(x, m.head.weight)


def _scaled(m, x):
    return 2 * m.head(m.norm(_chain(m.blocks, x)))


def _right(m, x):
    return m.head(m.norm(_chain(m.blocks, x)))


WRONG = {
    "a block is left out": (_skip, r"blocks\.2: is called 0 times in a forward pass"),
    "a block comes twice": (_loop, r"blocks\.3: is called 2 times"),
    "another order": (_swap, r"blocks: are called in the order blocks\.0, blocks\.2, blocks\.1, blocks\.3"),
    "a scale between blocks": (_between, r"blocks\.2: is given something else than the output of the block before it"),
    "parallel blocks": (
        _skip_connection,
        r"blocks: are called in the order|is given something else than the output of the block",
    ),
    "another argument": (_gate, r"blocks\.2: returns something else where a stage calls it, by a share"),
    "a sum before the norm": (_before_the_norm, r"norm: is given something else than the output of the last block"),
    "no norm": (_no_norm, r"head: is given something else than the output of norm"),
    "a scale behind the head": (_scaled, r"head: the decoder returns something else than its output, by a share 1"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_decoder_that_is_not_its_parts_in_order(what):
    forward, message = WRONG[what]
    names = {"attention_output": "attention.out", "feed_forward_down": "down"}
    model = _Decoder(forward, _Gated)
    with pytest.raises(ValueError, match=message):
        lc.subspace.constrain(model, case.RANK, **names)
    model.function = _right
    lc.subspace.constrain(model, case.RANK, **names)
    assert lc.subspace.check(model) == []
    model.function = forward
    (finding,) = lc.subspace.check(model)
    assert re.search(message, str(finding))


RIGHT = {
    "in place": (_right, _InPlace),
    "functions": (_of_functions, lambda block: block),
    "gates": (_right, _Gated),
}


@pytest.mark.parametrize("what", RIGHT)
def test_a_decoder_that_is(what):
    forward, wrap = RIGHT[what]
    model, ids = lc.subspace.constrain(_Decoder(forward, wrap), case.RANK), case.ids()
    assert lc.subspace.check(model) == []
    with torch.no_grad():
        assert case.apart(case.chain(case.cuts(model, 3), ids), model(ids)) < 1e-12
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def _with_rows(rows):
    """A decoder that adds trained rows to its embedding, where there are as many as tokens."""
    model = _Decoder(lambda m, x: _right(m, x + m.rows))
    model.rows = nn.Parameter(rows)
    return model


def _cut(model, rank):
    return lc.subspace.cut(model, 0, 2, boundary=lc.subspace.Projection(rank))


@pytest.mark.parametrize("make", [lc.subspace.constrain, _cut], ids=["constrain", "cut"])
def test_a_trained_parameter_that_no_stage_has(make):
    """No probe sees what a decoder of one context does to its embedding; that a parameter is in no part is seen all the same."""
    model = _with_rows(torch.zeros(case.TIME, case.WIDTH, dtype=torch.float64))
    with pytest.raises(ValueError, match="rows: is in no block, embedding, norm or head"):
        make(model, case.RANK)
    model.rows.requires_grad_(False)
    make(model, case.RANK)


def test_a_decoder_that_cannot_be_called_is_told(caplog):
    model = _with_rows(torch.zeros(case.TIME, case.WIDTH, dtype=torch.float64))
    model.rows.requires_grad_(False)
    with caplog.at_level(logging.WARNING, logger="torch_lowcomm.subspace"):
        lc.subspace.constrain(model, case.RANK)
    (told,) = caplog.messages
    assert told.startswith(
        "check: _Decoder could not be called with tokens alone, [2, 4]: what it computes besides its parts"
    )
