"""lc.diloco.presets: each makes an optimizer that takes outer steps; the inner optimizer that docs/diloco.md shows for one."""

import copy
import pathlib
import re

import ddp_model
import pytest
import torch

import torch_lowcomm as lc
from torch_lowcomm.diloco import presets

EVERY = 4


def _muon(model):
    """The page's optimizer of Muon and AdamW."""
    page = (pathlib.Path(__file__).parents[3] / "docs/diloco.md").read_text()
    (shown,) = re.findall(r"^class MuonAdamW.*?(?=\n\n\n)", page, re.DOTALL | re.MULTILINE)
    names = {"torch": torch}
    exec(shown, names)
    muon = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-2, adjust_lr_fn="match_rms_adamw")
    return names["MuonAdamW"](muon, torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2], lr=1e-2))


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("diloco", {}),
        ("streaming", {"fragments": 2, "fragment_sync_delay": 1}),
        ("diloco_x", {}),
        ("diloco_x", {"rank": 8, "sync_warmup": 1}),
        ("sparse_loco", {"keep": 512}),
        ("mu_loco", {}),
    ],
    ids=str,
)
@pytest.mark.on("pair", group={}, alike=True)
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
    assert [len(part["state"]) for part in saved[1]["parts"]] == [2, 2]
    trained(model, optimizer, 3)
    again, second = fresh()
    again.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    assert second.param_groups[0] is second.parts[0].param_groups[0], "a scheduler reaches the part"
    trained(again, second, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


# By preset the numbers of its paper: H, mode, γ, μ, bits an element.
PUBLISHED = {
    "diloco": {"sync_every": 500, "mode": "sync", "outer_lr": 0.7, "outer_momentum": 0.9, "codec": None},
    "streaming": {"fragment_update_alpha": 0.5, "outer_lr": 0.7, "outer_momentum": 0.9, "codec": "sym4:bucket=128"},
    "diloco_x": {"sync_every": 125, "mode": "continue", "codec": "sym4:bucket=128", "error_feedback": True},
    "sparse_loco": {"codec": "topk:chunk=4096,keep=64,values=sym2", "outer_lr": 1.0, "error_feedback": 0.95},
    "mu_loco": {"sync_every": 30, "codec": "gauss2"},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_its_papers_numbers(name):
    options = getattr(presets, name)()
    assert {option: options[option] for option in PUBLISHED[name]} == PUBLISHED[name]
