"""lc.diloco.presets: each makes an optimizer that takes outer steps; the inner optimizers that two of them need."""

import copy
import dataclasses

import ddp_model
import pytest
import torch

import torch_lowcomm as lc
from torch_lowcomm.diloco import presets

LOOPS = ("diloco", "opendiloco", "streaming", "diloco_x", "sparse_loco", "mu_loco")
EVERY = 4


def _muon(model):
    hidden = [p for p in model.parameters() if p.dim() == 2]
    return lc.diloco.MuonAdamW(hidden, [p for p in model.parameters() if p.dim() != 2], lr=1e-2)


def _run(r, name, given):
    r.init()
    torch.manual_seed(7)
    model = ddp_model.Net()
    before = [p.detach().clone() for p in model.parameters()]
    inner = _muon(model) if name == "mu_loco" else torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = getattr(presets, name)(sync_every=EVERY, **given)
    optimizer = lc.DiLoCoX(inner, model=model, **options)
    ddp_model.train(model, r.rank, 6 * EVERY, optimizer=optimizer, spare=True)
    optimizer.finish()
    moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return moved, optimizer.report["outer_steps"], [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("diloco", {}),
        ("opendiloco", {}),
        ("streaming", {"fragments": 2, "fragment_sync_delay": 1}),
        ("diloco_x", {}),
        ("diloco_x", {"rank": 8, "sync_warmup": 1}),
        ("sparse_loco", {"keep": 0.1}),
        ("mu_loco", {}),
    ],
    ids=str,
)
def test_a_preset_makes_outer_steps(pair, name, given):
    (moved, steps, mine), (_, _, theirs) = pair(_run, name, given)
    assert moved and steps >= 5
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_preset_has_options_alone():
    known = {field.name for field in dataclasses.fields(lc.diloco.DiLoCoXOptions)}
    for name in LOOPS:
        options = getattr(presets, name)()
        assert set(options) <= known and lc.diloco.DiLoCoXOptions(**options).sync_every > 1
    assert presets.diloco_x()["sync_every"] == 125 and "rank" not in presets.diloco_x()
    assert presets.diloco_x(rank=16)["min_sync_every"] == 31


def _cocktail(r):
    r.init()
    torch.manual_seed(7)
    model = ddp_model.Net()
    options = presets.cocktail(stride=2, keep=0.25)
    optimizer = lc.diloco.CocktailSGD(torch.optim.AdamW(model.parameters(), lr=1e-2), **options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    before = [p.detach().clone() for p in model.parameters()]
    ddp_model.train(model, r.rank, 6, optimizer=optimizer, spare=True)
    schedule.step()
    optimizer.finish()
    moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return moved, optimizer.inner.param_groups[0]["lr"], [p.detach().clone() for p in model.parameters()]


def test_cocktail_trains_the_same_parameters(pair):
    (moved, lr, mine), (_, _, theirs) = pair(_cocktail)
    assert moved and lr == pytest.approx(9e-3)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def _resumed_cocktail(r, path):
    r.init()

    def fresh(seed):
        torch.manual_seed(seed)
        model = ddp_model.Net()
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, lc.diloco.CocktailSGD(inner, **presets.cocktail(stride=3, keep=0.25))

    def shown(model, optimizer):
        return [*(p.detach().clone() for p in model.parameters()), optimizer.error()]

    model, optimizer = fresh(7)
    ddp_model.train(model, r.rank, 4, optimizer=optimizer, spare=True)
    torch.save(optimizer.state_dict(), f"{path}.{r.rank}")  # with an average under way
    ddp_model.train(model, r.rank, 4, optimizer=optimizer, spare=True)
    optimizer.finish()
    again, second = fresh(8)  # other parameters: those of the state count
    state = torch.load(f"{path}.{r.rank}", weights_only=True)
    assert state["average"] is not None
    second.load_state_dict(state)
    ddp_model.train(again, r.rank, 4, optimizer=second, spare=True)
    second.finish()
    ended = second.state_dict()
    assert ended["average"] is None and ended["steps"] == 8
    kept = second.error()
    for part, wrong, match in (
        ("residuals", state["residuals"][:2], r"residuals: expected shapes .*, got \["),
        ("outer", state["outer"][1:], "outer: expected shapes"),
        ("average", state["average"][1:], "average: expected shapes"),
    ):
        with pytest.raises(ValueError, match=match):
            second.load_state_dict({**state, part: wrong})
    with pytest.raises(ValueError, match=r"expected \['error'\] in the state"):
        second.load_state_dict({key: value for key, value in state.items() if key != "error"})
    assert torch.equal(second.error(), kept)
    return shown(model, optimizer), shown(again, second)


def test_cocktail_goes_on_from_its_state(pair, tmp_path):
    for straight, resumed in pair(_resumed_cocktail, str(tmp_path / "state")):
        assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))


def test_muon_goes_on_from_its_state():
    def trained(model, optimizer, steps):
        for step in range(steps):
            x = torch.randn(8, ddp_model.WIDTH, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), x).backward()
            optimizer.step()

    def fresh():
        torch.manual_seed(0)
        width = ddp_model.WIDTH
        model = torch.nn.Sequential(torch.nn.Linear(width, 12), torch.nn.Tanh(), torch.nn.Linear(12, width))
        return model, _muon(model)

    model, optimizer = fresh()
    trained(model, optimizer, 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert len(saved[1]["state"]) == 4
    trained(model, optimizer, 3)
    again, second = fresh()
    again.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    second.param_groups[0]["lr"] *= 1.0
    trained(again, second, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda w: lc.diloco.CocktailSGD([w], stride=2, keep=0.1), TypeError, "expected an optimizer, got list"),
        (lambda w: lc.diloco.CocktailSGD(torch.optim.SGD([w]), stride=0, keep=0.1), ValueError, "stride: .* got 0"),
        (lambda w: lc.diloco.CocktailSGD(torch.optim.SGD([w]), stride=2, keep=0.0), ValueError, "keep: .* got 0.0"),
        (lambda w: lc.diloco.MuonAdamW([w], [w]), ValueError, r"expected matrices, got a parameter of shape \(3,\)"),
        (lambda w: _muon(torch.nn.Linear(3, 3)).add_param_group({"params": [w]}), ValueError, "add_param_group"),
    ],
    ids=["no optimizer", "stride", "keep", "vector", "group"],
)
def test_mistakes(make, error, match):
    with pytest.raises(error, match=match):
        make(torch.nn.Parameter(torch.zeros(3)))


# By preset the numbers of its paper: H, mode, γ, μ, bits an element.
PUBLISHED = {
    "diloco": {"sync_every": 500, "mode": "sync", "outer_lr": 0.7, "outer_momentum": 0.9, "codec": None},
    "opendiloco": {"sync_every": 500, "mode": "sync", "outer_lr": 0.7, "outer_momentum": 0.9, "codec": "fp16"},
    "streaming": {"fragment_update_alpha": 0.5, "outer_lr": 0.7, "outer_momentum": 0.9, "codec": "sym4:bucket=128"},
    "diloco_x": {"sync_every": 125, "mode": "continue", "codec": "sym4:bucket=128", "error_feedback": True},
    "sparse_loco": {"outer_momentum": 0.0, "codec": "topk:keep=0.02,values=mid2", "error_feedback": True},
    "mu_loco": {"sync_every": 30, "codec": "gauss2"},
    "cocktail": {"stride": 10, "keep": 0.08},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_its_papers_numbers(name):
    options = getattr(presets, name)()
    assert {option: options[option] for option in PUBLISHED[name]} == PUBLISHED[name]


def test_diloco_x_with_factors_adapts_as_the_paper_does():
    options = presets.diloco_x(rank=24)
    asked = {"rank": 24, "adapt_rank": True, "adapt_sync_every": True, "adapt_to": "average", "min_sync_every": 31}
    assert {option: options[option] for option in asked} == asked
    assert lc.diloco.DiLoCoXOptions(**options).window == 5
