"""lc.DiLoCoX refuses a state that is not its own: it names the part that does not fit, and changes nothing."""

import ddp_model
import diloco_model
import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_lowcomm as lc

SAVED, STEPS = 10, 17


def _saved(r, options):
    model, optimizer = diloco_model.fresh(**options)
    diloco_model.train(model, optimizer, r.rank, range(SAVED))
    state = optimizer.state_dict()
    optimizer.finish()
    return state


def _expect_refused(r, state, model, optimizer, said):
    """What was there before is there after: training goes on as if nothing had been asked."""
    diloco_model.train(model, optimizer, r.rank, range(SAVED - 3))
    before = diloco_model.ended(model, optimizer)
    with pytest.raises(ValueError) as caught:
        optimizer.load_state_dict(state)
    assert all(part in str(caught.value) for part in said), caught.value
    assert not diloco_model.differing(diloco_model.ended(model, optimizer), before)
    assert optimizer.param_groups is optimizer.inner.param_groups
    diloco_model.train(model, optimizer, r.rank, range(SAVED - 3, STEPS))
    optimizer.finish()


def _wider(**options):
    torch.manual_seed(7)
    model = diloco_model.Net()
    model.down, model.small = nn.Linear(2 * ddp_model.WIDTH, 32), nn.Linear(32, 7)
    return model, lc.DiLoCoX(torch.optim.AdamW(model.parameters(), lr=1e-2), diloco_model.EVERY, model=model, **options)


def _renamed(**options):
    model, optimizer = diloco_model.fresh(**options)
    return model, lc.DiLoCoX(optimizer.inner, diloco_model.EVERY, **options)  # by numbers, without model=


def _two_groups(**options):
    torch.manual_seed(7)
    model = diloco_model.Net()
    first, *others = model.parameters()
    inner = torch.optim.AdamW([{"params": [first]}, {"params": others}], lr=1e-2)
    return model, lc.DiLoCoX(inner, diloco_model.EVERY, model=model, **options)


REFUSALS = {
    "another model": ({}, _wider, ["down.weight.outer: expected", "[32, 96], got", "[48, 96]"]),
    "other names": ({}, _renamed, ["expected '0.", "in the state, got none"]),
    "other groups": ({}, _two_groups, ["different number of parameter groups"]),
    "residuals of 8 bits": ({"residual_dtype": "int8"}, diloco_model.fresh, ["residual: expected", "Float"]),
    "no residuals": (
        {"error_feedback": True, "codec": "gauss2"},
        diloco_model.fresh,
        ["residual' in the state, got none"],
    ),
    "more fragments": ({"fragments": 3}, diloco_model.fresh, ["expected 'fragment1' in the state, got none"]),
}


@pytest.mark.parametrize("case", REFUSALS)
@pytest.mark.on("pair", group={})
def test_a_state_that_does_not_fit_is_refused(r, case):
    options, make, said = REFUSALS[case]
    state = _saved(r, {"codec": "gauss2"} if case == "no residuals" else {})
    _expect_refused(r, state, *make(**options), said)


@pytest.mark.on("pair", group={})
def test_another_ranks_state_is_refused(r):
    states = [None, None]
    dist.all_gather_object(states, _saved(r, {}))
    said = f"expected 'rank{r.rank}', got ['outer0', 'rank{1 - r.rank}']: each rank loads its own"
    _expect_refused(r, states[1 - r.rank], *diloco_model.fresh(), [said])
