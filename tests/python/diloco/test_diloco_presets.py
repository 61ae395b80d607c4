"""lc.diloco.presets: each makes an optimizer that takes outer steps; the inner optimizer that one of them needs."""

import copy

import ddp_model
import pytest
import torch
from ranks import on_ranks

import torch_lowcomm as lc
from torch_lowcomm.diloco import presets

EVERY = 4


def _muon(model):
    hidden = [p for p in model.parameters() if p.dim() == 2]
    return lc.diloco.MuonAdamW(hidden, [p for p in model.parameters() if p.dim() != 2], lr=1e-2)


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
@on_ranks("pair", alike=True)
def test_a_preset_makes_outer_steps(r, name, given):
    torch.manual_seed(7)
    model = ddp_model.Net()
    before = [p.detach().clone() for p in model.parameters()]
    inner = _muon(model) if name == "mu_loco" else torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = getattr(presets, name)(sync_every=EVERY, **given)
    optimizer = lc.DiLoCoX(inner, model=model, **options)
    ddp_model.train(model, r.rank, 6 * EVERY, optimizer=optimizer, spare=True)
    optimizer.finish()
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert optimizer.report["outer_steps"] >= 5
    return [p.detach().clone() for p in model.parameters()]


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
        (lambda w: lc.diloco.MuonAdamW([w], [w]), ValueError, r"expected matrices, got a parameter of shape \(3,\)"),
        (lambda w: _muon(torch.nn.Linear(3, 3)).add_param_group({"params": [w]}), ValueError, "add_param_group"),
    ],
    ids=["vector", "group"],
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
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_its_papers_numbers(name):
    options = getattr(presets, name)()
    assert {option: options[option] for option in PUBLISHED[name]} == PUBLISHED[name]
