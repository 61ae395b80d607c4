"""Weights of two modules: refused with both names where they are tied or shared; one module may have two names in its block."""

import pytest
import subspace_case as case
import torch
from torch import nn

import torch_lowcomm as lc


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
    model.blocks[2].down.weight = model.blocks[0].down.weight
    for said in (message, "blocks.0.down.weight: tied to blocks.2.down.weight"):
        with pytest.raises(ValueError, match=said):
            lc.subspace.constrain(model, case.RANK)


def test_a_tied_head_is_untied():
    model = case.gpt()
    model.head.weight = model.embed.weight
    lc.subspace.constrain(model, case.RANK)
    assert model.subspace_report.untied and model.head.weight is not model.embed.weight
    head = model.head.weight.detach()
    assert case.apart(model.subspace_basis.project(head), head) > 0.5
    model.head.weight = model.embed.weight
    assert "embed.weight: tied to head.weight" in str(lc.subspace.check(model)[0])


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
