"""lc.subspace.Projection: a boundary of decoders whose weights are free, by its formulas."""

import logging

import pytest
import subspace_case as case
import torch
from torch import nn

import torch_lowcomm as lc
from torch_lowcomm.subspace.anchor import Anchor
from torch_lowcomm.subspace.basis import Basis

KINDS = {
    "fixed": {},
    "learned": {"learned": True},
    "own anchors": {"anchor": "own"},
    "learned, own anchors": {"learned": True, "anchor": "own"},
    "signs": {"anchor": "signs", "sigma": 0.5},
    "no anchors": {"anchor": "none"},
}


def _stages(model, boundary, count=2):
    return case.cuts(model, count, boundary=boundary)


def _before(model, ids, blocks=2):
    x = model.embed(ids)
    for block in model.blocks[:blocks]:
        x = block(x)
    return x


@pytest.mark.parametrize("kind", KINDS)
def test_what_arrives_is_the_anchor_and_the_projected_rest(kind):
    model, ids = case.gpt(), case.ids()
    first, last = _stages(model, lc.subspace.Projection(case.RANK, seed=3, **KINDS[kind]))
    vectors = Basis(case.WIDTH, case.RANK, seed=3).vectors
    anchor = {
        "embedding": lambda: model.embed(ids),
        "own": lambda: model.embed(ids),
        "signs": lambda: Anchor(128, case.WIDTH, seed=3, sigma=0.5)(ids, torch.float64),
        "none": lambda: torch.zeros(()),
    }[KINDS[kind].get("anchor", "embedding")]()
    x = _before(model, ids)
    sent = first(ids)
    assert sent.shape == (case.BATCH, case.TIME, case.RANK)
    expected = (x - anchor) @ vectors.T @ vectors + anchor
    assert case.apart(last.decode(sent, ids, 0), expected) < 1e-12
    assert not first.exact and not last.exact
    for block in model.blocks[2:]:
        expected = block(expected)
    assert case.apart(last(sent, ids=ids), model.head(model.norm(expected))) < 1e-12


@pytest.mark.parametrize("anchor", ["embedding", "own", "signs", "none"])
def test_full_rank_loses_nothing(anchor):
    model, ids = case.gpt(), case.ids()
    stages = _stages(model, lc.subspace.Projection(case.WIDTH, anchor=anchor), 4)
    assert case.apart(case.chain(stages, ids), case.chain(_stages(model, lc.subspace.Projection(1), 1), ids)) < 1e-12


def _trained(stages, steps=20):
    ids = case.ids()
    parameters = [p for stage in stages for p in stage.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        logits = case.chain(stages, ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_training(kind):
    stages = _stages(case.gpt(torch.float32), lc.subspace.Projection(case.RANK, **KINDS[kind]))
    before = {name: value.clone() for stage in stages for name, value in stage.state_dict().items()}
    losses = _trained(stages)
    assert losses[-1] < 0.5 * losses[0]
    moved = {
        name for stage in stages for name, value in stage.state_dict().items() if not torch.equal(value, before[name])
    }
    learned, own = KINDS[kind].get("learned", False), KINDS[kind].get("anchor") == "own"
    for side, stage in (("encode", stages[0]), ("decode", stages[1])):
        rows = getattr(stage, side).projection.weight.detach()
        torch.testing.assert_close(rows @ rows.T, torch.eye(case.RANK), atol=1e-5, rtol=0)
        assert any(f"{side}.projection" in name for name in moved) == learned
    assert ("boundaries.1.decode.anchor.weight" in moved) == own
    assert not any("encode.anchor" in name for name in moved)


def test_states():
    """A boundary's own parameters are in its stages' states; another cut has another boundary, which is named."""
    boundary = lc.subspace.Projection(8, learned=True, anchor="own")
    stages = _stages(case.gpt(torch.float32), boundary)
    _trained(stages, 3)
    merged = lc.subspace.merge_states([stage.state_dict() for stage in stages])
    ids, fresh = case.ids(), _stages(case.gpt(torch.float32, seed=1), boundary)
    for stage in fresh:
        assert str(stage.load_state_dict(merged)) == "<All keys matched successfully>"
    assert torch.equal(case.chain(fresh, ids), case.chain(stages, ids))
    with pytest.raises(RuntimeError, match=r"Missing key.*boundaries.0.encode"):
        lc.subspace.cut(case.gpt(torch.float32), 0, 2, blocks=[1, 3], boundary=boundary).load_state_dict(merged)


def test_says_that_it_is_not_exact(caplog):
    with caplog.at_level(logging.INFO, logger="torch_lowcomm.subspace"):
        _stages(case.gpt(), lc.subspace.Projection(4))
    assert (
        "cut: not exact: Projection(rank=4, seed=0, learned=False, anchor='embedding'), coefficients fp32"
        in caplog.text
    )


OTHERS = {
    "seed": [lc.subspace.Projection(4, anchor="none", seed=s) for s in (0, 1)],
    "rank": [lc.subspace.Projection(r, anchor="none") for r in (4, 5)],
    "learned": [lc.subspace.Projection(4, learned=x) for x in (False, True)],
    "anchor": [lc.subspace.Projection(4, anchor=a) for a in ("own", "none")],
    "sigma": [lc.subspace.Projection(4, anchor="signs", sigma=s) for s in (0.1, 0.2)],
}


@pytest.mark.parametrize("option", OTHERS)
def test_stages_with_another_option_differ(option):
    """Both the checksum of each micro-batch, and the text that is compared before the first step."""
    one, other = (lc.subspace.cut(case.gpt(), 0, 2, boundary=boundary) for boundary in OTHERS[option])
    assert one.message_context(case.ids())["boundary"] != other.message_context(case.ids())["boundary"]
    assert one.message_options["boundary"] != other.message_options["boundary"]
    same = lc.subspace.cut(case.gpt(), 1, 2, boundary=OTHERS[option][0])
    assert same.message_options == one.message_options
