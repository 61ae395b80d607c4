"""lc.subspace.constrain: what is constrained and what stays, the names of parts, and what is refused before anything runs."""

import functools
import logging

import pytest
import subspace_case as case
import torch
from model import VOCABULARY
from torch import nn

import torch_lowcomm as lc


def _outside(basis, rows):
    """The share of rows' norm outside the subspace, by U itself."""
    vectors = basis.vectors.to(rows.dtype)
    rows = rows.detach()
    return float((rows - rows @ vectors.T @ vectors).norm() / rows.norm())


def test_only_what_lies_outside_is_lost():
    free, model = case.gpt(), case.constrained(free_blocks=0)
    basis = model.subspace_basis
    for before, after in zip(free.blocks, model.blocks, strict=True):
        torch.testing.assert_close(after.down.weight, basis.project_weight(before.down.weight))
        torch.testing.assert_close(after.attention.out.weight, basis.project_weight(before.attention.out.weight))
        assert torch.equal(after.up.weight, before.up.weight) and torch.equal(
            after.attention.qkv.weight, before.attention.qkv.weight
        )
    assert _outside(basis, model.embed.weight) < 1e-14 and torch.equal(model.head.weight, free.head.weight)
    report = model.subspace_report
    assert report.lost["blocks.1.down.weight"] == pytest.approx(_outside(basis, free.blocks[1].down.weight.T), rel=1e-6)
    assert (report.width, report.rank, report.blocks, report.untied) == (case.WIDTH, case.RANK, case.LAYERS, False)


def test_one_basis_and_the_names_of_before():
    model = case.constrained()
    names = set(model.state_dict())
    assert "subspace_basis.vectors" in names
    assert {name for name in names if not name.startswith("subspace_")} == set(case.gpt().state_dict())
    assert [name for name, m in model.named_modules() if m is model.subspace_basis] == ["subspace_basis"]
    assert model.to(torch.float32).subspace_basis.vectors.dtype == torch.float64


def test_the_residual_stream_is_the_fixed_part_and_k_numbers():
    """Before each block that is constrained, and behind the last one of them."""
    model, ids = case.constrained(), case.ids()
    x = model.embed(ids)
    for block in model.blocks[:-1]:
        x = block(x)
        rest = x - model.embed.anchor(ids, x.dtype)
        assert _outside(model.subspace_basis, rest) < 1e-13 < _outside(model.subspace_basis, x)
    model(ids, ids).backward()
    assert model.embed.weight.grad.abs().max() > 0
    assert not [name for name, _ in model.named_parameters() if "anchor" in name or "basis" in name]


def test_the_fixed_part_has_the_embeddings_size():
    assert case.constrained().subspace_report.sigma == pytest.approx(
        float(case.gpt().embed.weight.detach().std()), rel=0.05
    )
    rows = case.constrained(sigma=0.25).embed.anchor(torch.arange(9), torch.float64)
    assert torch.equal(rows.abs(), torch.full_like(rows, 0.25))
    rows = case.constrained(sigma=0.25, fixed="gaussian").embed.anchor(torch.arange(VOCABULARY), torch.float64)
    assert len(rows.abs().unique()) > 1000 and float(rows.std()) == pytest.approx(0.25, rel=0.1)


def test_the_fixed_part_of_an_embedding_of_zeros():
    model = case.gpt()
    nn.init.zeros_(model.embed.weight)
    with pytest.raises(ValueError, match="sigma: expected a number where embed.weight is all zeros"):
        lc.subspace.constrain(model, case.RANK)
    assert lc.subspace.constrain(model, case.RANK, sigma=0.0).embed.anchor.sigma == 0  # a choice, not an accident


def test_says_what_it_found(caplog):
    with caplog.at_level(logging.INFO, logger="torch_lowcomm.subspace"):
        case.constrained()
    assert "4 blocks (blocks, plain) of width 32, rank 8" in caplog.text
    assert "constrained are embed, attention.out and down" in caplog.text


class _Other(nn.Module):
    """A decoder whose parts have names of their own."""

    def __init__(self):
        super().__init__()
        whole = case.gpt()
        self.words, self.tower, self.final, self.out = whole.embed, whole.blocks, whole.norm, whole.head
        for block in self.tower:
            block.shrink = block.down
            del block.down
            block.forward = functools.partial(_other_block, block)

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.tower:
            x = block(x)
        return self.out(self.final(x))


def _other_block(block, x):
    return x + block.shrink(nn.functional.gelu(block.up(x + block.attention(x))))


def test_parts_by_name():
    names = {"embedding": "words", "blocks": "tower", "norm": "final", "head": "out", "feed_forward_down": "shrink"}
    with pytest.raises(
        ValueError, match=r"_Other: embedding, blocks, .*not found; .*The decoder has words, tower, final, out"
    ):
        lc.subspace.constrain(_Other(), case.RANK)
    with pytest.raises(ValueError, match=r"feed_forward_down not found.*shrink \(128 to 32\)"):
        lc.subspace.constrain(_Other(), case.RANK, **(names | {"feed_forward_down": None}))
    with pytest.raises(ValueError, match=r"feed_forward_down='shrunk': block 0 has no such part; it has .*shrink"):
        lc.subspace.constrain(_Other(), case.RANK, **(names | {"feed_forward_down": "shrunk"}))
    with pytest.raises(ValueError, match=r"expected tower.0.up to have the embedding's 32 outputs, got 128"):
        lc.subspace.constrain(_Other(), case.RANK, **(names | {"feed_forward_down": "up"}))
    with pytest.raises(ValueError, match=r"expected tower.0.mlp_norm to be an nn.Linear, got RMSNorm"):
        lc.subspace.constrain(_Other(), case.RANK, **(names | {"feed_forward_down": "mlp_norm"}))
    model = lc.subspace.constrain(_Other(), case.RANK, **names)
    assert model.subspace_parts.feed_forward_down == "shrink"
    assert model.tower[2].shrink.subspace_role == "feed_forward_down"


def test_trained_weights_are_refused(caplog):
    with pytest.raises(ValueError, match="built from a config, got trained weights.*8 of 32 dimensions"):
        case.constrained(pretrained=True)
    with caplog.at_level(logging.WARNING, logger="torch_lowcomm.subspace"):
        model = case.constrained(pretrained=True, project_pretrained=True)
    share = model.subspace_report.lost["blocks.2.attention.out.weight"]
    assert 0.5 < share < 1
    assert f"blocks.2.attention.out.weight loses {share:.3g} of its norm" in caplog.text
