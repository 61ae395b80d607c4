"""lc.subspace.Projection: a boundary of decoders whose weights are free, by its formulas; and a boundary that is trained."""

import logging

import pytest
import subspace_case as case
import torch
from torch import nn

import torch_lowcomm as lc
from torch_lowcomm.subspace.basis import Basis


def _stages(model, boundary, count=2):
    return case.cuts(model, count, boundary=boundary)


def test_what_arrives_is_the_anchor_and_the_projected_rest():
    model, ids = case.gpt(), case.ids()
    first, last = _stages(model, lc.subspace.Projection(case.RANK, seed=3))
    vectors = Basis(case.WIDTH, case.RANK, seed=3).vectors
    x = anchor = model.embed(ids)
    for block in model.blocks[:2]:
        x = block(x)
    sent = first(ids)
    assert sent.shape == (case.BATCH, case.TIME, case.RANK)
    expected = (x - anchor) @ vectors.T @ vectors + anchor
    assert case.apart(last.decode(sent, ids, 0), expected) < 1e-12
    assert not first.exact and not last.exact
    for block in model.blocks[2:]:
        expected = block(expected)
    assert case.apart(last(sent, ids=ids), model.head(model.norm(expected))) < 1e-12


def test_full_rank_loses_nothing():
    model, ids = case.gpt(), case.ids()
    stages = _stages(model, lc.subspace.Projection(case.WIDTH), 4)
    assert case.apart(case.chain(stages, ids), case.chain(_stages(model, lc.subspace.Projection(1), 1), ids)) < 1e-12


class _Trained:
    """A boundary of one's own, whose sides are trained."""

    exact, rank = False, case.RANK

    def side(self, stage, number, embedding, *, encodes):
        sizes = (case.WIDTH, self.rank) if encodes else (self.rank, case.WIDTH)
        torch.manual_seed(number)
        return _TrainedSide(*sizes)


class _TrainedSide(nn.Linear):
    def forward(self, x, ids, start=0):
        return super().forward(x)


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


@pytest.mark.parametrize("boundary", [lc.subspace.Projection(case.RANK), _Trained()], ids=["projection", "trained"])
def test_training(boundary):
    stages = _stages(case.gpt(torch.float32), boundary)
    before = {name: value.clone() for stage in stages for name, value in stage.state_dict().items()}
    losses = _trained(stages)
    assert losses[-1] < 0.5 * losses[0]
    moved = {
        name for stage in stages for name, value in stage.state_dict().items() if not torch.equal(value, before[name])
    }
    for side in ("encode", "decode"):
        assert any(name.startswith(f"boundaries.1.{side}") for name in moved) == isinstance(boundary, _Trained)


@pytest.mark.parametrize("boundary", [lc.subspace.Projection(8), _Trained()], ids=["projection", "trained"])
def test_states(boundary):
    """A boundary's own tensors are in its stages' states; another cut has another boundary, which is named."""
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
    assert "cut: not exact: Projection(rank=4, seed=0), coefficients fp32" in caplog.text


OTHERS = {
    "seed": [(lc.subspace.Projection(4, seed=s), 0) for s in (0, 1)],
    "rank": [(lc.subspace.Projection(r), 0) for r in (4, 5)],
    "embedding": [(lc.subspace.Projection(4), s) for s in (0, 1)],
}


@pytest.mark.parametrize("option", OTHERS)
def test_stages_with_another_option_differ(option):
    """Both the checksum of each micro-batch, and the text that is compared before the first step."""
    one, other = (lc.subspace.cut(case.gpt(seed=s), 0, 2, boundary=boundary) for boundary, s in OTHERS[option])
    assert one.message_context(case.ids())["boundary"] != other.message_context(case.ids())["boundary"]
    assert one.message_options["boundary"] != other.message_options["boundary"]
    same = lc.subspace.cut(case.gpt(), 1, 2, boundary=OTHERS[option][0][0])
    assert same.message_options == one.message_options
