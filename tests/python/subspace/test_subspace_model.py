"""lc.subspace.constrain and check: what is constrained, and each thing that is refused, by its name."""

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_weights_are_in_the_subspace(dtype):
    model = case.constrained(dtype, free_blocks=0)
    limit = 1e-5 if dtype == torch.float32 else 1e-14
    for block in model.blocks:
        for role, linear in (("attention_output", block.attention.out), ("feed_forward_down", block.down)):
            assert linear.subspace_role == role and linear.subspace_basis is model.subspace_basis
            assert _outside(model.subspace_basis, linear.weight.T) < limit
            assert torch.linalg.matrix_rank(linear.weight.double(), rtol=1e-4) == case.RANK
    assert model.embed.subspace_role == "embedding" and model.embed.subspace_basis is model.subspace_basis
    assert _outside(model.subspace_basis, model.embed.weight) < limit
    assert lc.subspace.check(model) == []


def test_only_what_lies_outside_is_lost():
    free, model = case.gpt(), case.constrained(free_blocks=0)
    basis = model.subspace_basis
    for before, after in zip(free.blocks, model.blocks, strict=True):
        torch.testing.assert_close(after.down.weight, basis.project_weight(before.down.weight))
        torch.testing.assert_close(after.attention.out.weight, basis.project_weight(before.attention.out.weight))
        assert torch.equal(after.up.weight, before.up.weight) and torch.equal(
            after.attention.qkv.weight, before.attention.qkv.weight
        )
    assert torch.equal(model.head.weight, free.head.weight)
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


@pytest.mark.parametrize("rank", [0, case.WIDTH + 1])
def test_rank_is_one_of_the_widths(rank):
    with pytest.raises(ValueError, match=rf"rank: expected one of 1...32, the width, got {rank}"):
        lc.subspace.constrain(case.gpt(), rank)


def test_twice_is_refused():
    with pytest.raises(ValueError, match="expected a decoder that is not constrained"):
        lc.subspace.constrain(case.constrained(), case.RANK)
    with pytest.raises(TypeError, match="expected a model that lc.subspace.constrain has returned, got GPT"):
        lc.subspace.check(case.gpt())


def test_trained_weights_are_refused(caplog):
    with pytest.raises(ValueError, match="built from a config, got trained weights.*8 of 32 dimensions"):
        case.constrained(pretrained=True)
    with caplog.at_level(logging.WARNING, logger="torch_lowcomm.subspace"):
        model = case.constrained(pretrained=True, project_pretrained=True)
    share = model.subspace_report.lost["blocks.2.attention.out.weight"]
    assert 0.5 < share < 1
    assert f"blocks.2.attention.out.weight loses {share:.3g} of its norm" in caplog.text


class _Behind(nn.Module):
    """A projection's wrapper's place: what stands behind it in a block."""

    def __init__(self, block, behind):
        super().__init__()
        self.inner, self.behind = block, behind

    def forward(self, x):
        b = self.inner
        x = x + self.behind(b.attention.out(b.attention.qkv(b.attention_norm(x)).chunk(3, -1)[0]))
        return x + b.down(nn.functional.gelu(b.up(b.mlp_norm(x))))


class _Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(case.WIDTH))

    def forward(self, x):
        return self.gamma * x


def _with_behind(behind):
    model = case.gpt()
    model.blocks[2] = _Behind(model.blocks[2], behind)
    model.blocks = nn.ModuleList(_Behind(b, nn.Identity()) if i != 2 else b for i, b in enumerate(model.blocks))
    return model.double()


NAMES = {"attention_output": "inner.attention.out", "feed_forward_down": "inner.down"}
BEHIND = {
    "dropout": (nn.Dropout(0.1), r"blocks.2.behind: dropout of 0.1 behind blocks.2.inner.attention.out takes"),
    "post-norm": (
        nn.RMSNorm(case.WIDTH),
        r"blocks.2.behind: RMSNorm, a norm or gain, behind blocks.2.inner.attention.out",
    ),
    "layer norm": (nn.LayerNorm(case.WIDTH), r"blocks.2.behind: LayerNorm, a norm or gain, behind blocks.2.inner"),
    "LayerScale": (_Gain(), r"blocks.2.behind: _Gain, a norm or gain, behind blocks.2.inner.attention.out"),
}


@pytest.mark.parametrize("what", BEHIND)
def test_behind_a_projection(what):
    behind, message = BEHIND[what]
    model = _with_behind(behind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=message) as error:
        lc.subspace.constrain(model, case.RANK, **NAMES)
    assert "blocks.1" not in str(error.value)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    assert model.training and not hasattr(model, "subspace_basis")


@pytest.mark.parametrize(
    "behind", [nn.Identity(), nn.Dropout(0.0), nn.RMSNorm(case.WIDTH, elementwise_affine=False)], ids=repr
)
def test_what_may_stand_behind_a_projection(behind):
    assert lc.subspace.check(lc.subspace.constrain(_with_behind(behind), case.RANK, **NAMES)) == []


def test_a_gain_that_is_no_module():
    model = case.gpt()
    block = model.blocks[1]
    block.gamma = nn.Parameter(torch.ones(case.WIDTH, dtype=torch.float64))
    block.forward = lambda x: x + block.gamma * block.down(block.up(x + block.attention(block.attention_norm(x))))
    with pytest.raises(ValueError, match=r"blocks.1: a share 0\.\d+ of its output is outside the subspace: a gain"):
        lc.subspace.constrain(model, case.RANK)


def test_biases():
    model = case.gpt()
    model.blocks[2].down.bias = nn.Parameter(torch.ones(case.WIDTH, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"blocks.2.down.bias: a trained bias leaves the subspace"):
        lc.subspace.constrain(model, case.RANK)
    model.blocks[2].down.bias.requires_grad_(False)
    lc.subspace.constrain(model, case.RANK)
    assert _outside(model.subspace_basis, model.blocks[2].down.bias) < 1e-14
    model.blocks[2].down.bias[0] += 1
    assert "blocks.2.down.bias" in str(lc.subspace.check(model)[0])


class _Entry(nn.Module):
    """A decoder that changes the embedding before its first block."""

    def __init__(self, change):
        super().__init__()
        whole = case.gpt()
        self.embed, self.blocks, self.norm, self.head = whole.embed, whole.blocks, whole.norm, whole.head
        self.change, self.rows = change, nn.Parameter(torch.randn(48, case.WIDTH, dtype=torch.float64))

    def forward(self, tokens):
        x = self.change(self.embed(tokens), self.rows[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


ENTRIES = {
    "scaled": (lambda x, _: x * 5.0, r"embed: it is scaled by 5 before the first block"),
    "trained positions": (lambda x, rows: x + rows, r"rows: trained positions are added to the embedding"),
    "dropout": (lambda x, _: nn.functional.dropout(x, 0.1), r"embed: a dropout, norm or other module changes it"),
    "computed positions": (
        lambda x, _: x + 0.5,
        r"positions: something is added to every sequence behind the embedding",
    ),
}


@pytest.mark.parametrize("what", ENTRIES)
def test_between_the_embedding_and_the_first_block(what):
    change, message = ENTRIES[what]
    with pytest.raises(ValueError, match=message):
        lc.subspace.constrain(_Entry(change), case.RANK)


def test_frozen_positions_are_named():
    model = _Entry(lambda x, rows: x + rows)
    model.rows.requires_grad_(False)
    with pytest.raises(ValueError, match=r"rows: is added to the embedding: name it by positions='rows'"):
        lc.subspace.constrain(model, case.RANK)
    assert lc.subspace.constrain(model, case.RANK, positions="rows").subspace_parts.positions == "rows"
    model.rows.requires_grad_(True)
    assert "rows: trained positions" in str(lc.subspace.check(model)[0])


def test_a_tied_head_is_untied():
    model = case.gpt()
    model.head.weight = model.embed.weight
    lc.subspace.constrain(model, case.RANK)
    assert model.subspace_report.untied and model.head.weight is not model.embed.weight
    assert _outside(model.subspace_basis, model.head.weight) > 0.5
    model.head.weight = model.embed.weight
    assert "embed.weight: tied to head.weight" in str(lc.subspace.check(model)[0])


def test_shared_projections():
    model = case.gpt()
    model.blocks[2].down.weight = model.blocks[0].down.weight
    with pytest.raises(ValueError, match="blocks.0.down.weight: tied to blocks.2.down.weight"):
        lc.subspace.constrain(model, case.RANK)


def _share_a_block(model):
    model.blocks[2] = model.blocks[0]


def _share_a_norm(model):
    model.blocks[3].mlp_norm = model.blocks[1].attention_norm


def _share_with_the_head(model):
    model.blocks[1].up.weight = model.head.weight


SHARED = {
    "a block": (_share_a_block, "blocks.0.up.weight", "blocks.2.up.weight"),
    "a norm": (_share_a_norm, "blocks.1.attention_norm.weight", "blocks.3.mlp_norm.weight"),
    "the head": (_share_with_the_head, "blocks.1.up.weight", "head.weight"),
}


@pytest.mark.parametrize("what", SHARED)
def test_parameters_of_two_blocks(what):
    """Refused with both names: by constrain, by check of a model that shares later, and by a cut between the two."""
    share, one, other = SHARED[what]
    model = case.gpt()
    share(model)
    with pytest.raises(ValueError, match=f"{one}: is shared with {other}: stages would train it apart") as refused:
        lc.subspace.constrain(model, case.RANK)
    assert ("blocks.0.down.weight: tied to blocks.2.down.weight" in str(refused.value)) == (what == "a block")
    model = case.constrained()
    assert lc.subspace.check(model) == []
    share(model)
    assert f"{one}: is shared with {other}" in "\n".join(map(str, lc.subspace.check(model)))
    first, second = (name.split(".")[1] if name.startswith("blocks") else 3 for name in (one, other))
    with pytest.raises(ValueError, match=rf"got blocks\S+ of stage {first}, which is \S+ of stage {second} too"):
        lc.subspace.cut(model, 0, 4)
    lc.subspace.cut(model, 0, 1)
    if what == "a block":  # both on one stage
        lc.subspace.cut(model, 0, 2, blocks=[3, 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype, caplog):
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=rf"blocks.0.attention.out: adds to the residual stream in {name}"):
        case.constrained(dtype)
    with caplog.at_level(logging.WARNING, logger="torch_lowcomm.subspace"):
        model = case.constrained(dtype, allow_half=True)
    assert caplog.text.count(f"not exact: blocks.2.down: adds to the residual stream in {name}") == 1
    assert all(finding.half for finding in lc.subspace.check(model))


def test_a_weight_that_has_moved():
    model = case.constrained(torch.float32)
    with torch.no_grad():
        model.blocks[1].down.weight[3, 4] += 1
        model.embed.weight[7] += 0.1
    found = {finding.module: finding.reason for finding in lc.subspace.check(model)}
    assert set(found) == {"blocks.1.down.weight", "embed.weight"}
    share = _outside(model.subspace_basis, model.blocks[1].down.weight.T)
    assert found["blocks.1.down.weight"] == f"a share {share:.3g} of its norm is outside the subspace"


def test_check_changes_nothing():
    model = case.constrained(torch.float32).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    lc.subspace.check(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
