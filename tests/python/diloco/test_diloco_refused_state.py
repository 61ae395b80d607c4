"""lc.DiLoCoX refuses a state that is not its own: it names the part that does not fit, and changes nothing."""

import ddp_model
import diloco_model
import pytest
import torch
from torch import nn

import torch_lowcomm as lc

SAVED, STEPS = 10, 17


def _saves(r, folder, options):
    r.init()
    model, optimizer = diloco_model.fresh(**options)
    diloco_model.train(model, optimizer, r.rank, range(SAVED))
    torch.save(optimizer.state_dict(), f"{folder}/rank{r.rank}.pt")


def _refuses(r, folder, options, file, make):
    """The error, and that what was there before is there after: training goes on as if nothing had been asked."""
    r.init()
    model, optimizer = make(**options)
    diloco_model.train(model, optimizer, r.rank, range(SAVED - 3))
    before = diloco_model.ended(model, optimizer)
    with pytest.raises(ValueError) as caught:
        optimizer.load_state_dict(torch.load(f"{folder}/rank{r.rank if file is None else file}.pt"))
    assert not diloco_model.differing(diloco_model.ended(model, optimizer), before)
    assert optimizer.param_groups is optimizer.inner.param_groups
    diloco_model.train(model, optimizer, r.rank, range(SAVED - 3, STEPS))
    optimizer.finish()
    return str(caught.value)


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
    "another model": ({}, None, _wider, ["down.weight.outer: expected", "[32, 96], got", "[48, 96]"]),
    "other names": ({}, None, _renamed, ["expected '0.", "in the state, got none"]),
    "other groups": ({}, None, _two_groups, ["different number of parameter groups"]),
    "residuals of 8 bits": ({"residual_dtype": "int8"}, None, diloco_model.fresh, ["residual: expected", "Float"]),
    "no residuals": (
        {"error_feedback": True, "codec": "gauss2"},
        None,
        diloco_model.fresh,
        ["residual' in the state, got none"],
    ),
    "more fragments": ({"fragments": 3}, None, diloco_model.fresh, ["expected 'fragment1' in the state, got none"]),
    "another mode": (
        {"mode": "restart"},
        None,
        diloco_model.fresh,
        ["mode: expected restart, got the state of continue"],
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_state_that_does_not_fit_is_refused(pair, tmp_path, case):
    options, file, make, said = REFUSALS[case]
    pair(_saves, str(tmp_path), {"codec": "gauss2"} if case == "no residuals" else {})
    for text in pair(_refuses, str(tmp_path), options, file, make):
        assert all(part in text for part in said), text


def test_a_state_of_another_number_of_ranks_is_refused(trio, pair, tmp_path):
    trio(_saves, str(tmp_path), {})
    for text in pair(_refuses, str(tmp_path), {}, None, diloco_model.fresh):
        assert "expected the state of a group of 2 ranks, got one of 3" in text, text


def test_another_ranks_state_is_refused(pair, tmp_path):
    pair(_saves, str(tmp_path), {})
    (tmp_path / "rank2.pt").write_bytes((tmp_path / "rank0.pt").read_bytes())
    (tmp_path / "rank0.pt").write_bytes((tmp_path / "rank1.pt").read_bytes())
    (tmp_path / "rank1.pt").write_bytes((tmp_path / "rank2.pt").read_bytes())
    for rank, text in enumerate(pair(_refuses, str(tmp_path), {}, None, diloco_model.fresh)):
        assert f"expected 'rank{rank}', got ['outer0', 'rank{1 - rank}']: each rank loads its own" in text, text
