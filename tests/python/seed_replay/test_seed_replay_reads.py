"""Weights that a loss reads in other ways than its layers do are perturbed too: penalties, lists, autocast's kept casts."""

import logging

import pytest
import torch
from torch import nn

import torch_lowcomm as lc

ROWS, WIDTH = 32, 64


def _data():
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    return x, x[:, :8].sin()


def _model(tied=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))
    if tied:
        model.append(nn.Linear(8, 8))
        model[3].weight = nn.Parameter(torch.eye(8))
        model[2].bias = model[3].bias
    return model


def _losses_under_autocast(perturb, estimator):
    """Autocast's region ends after the steps, as torch's pages do not advise."""
    (x, y), model, losses = _data(), _model(), []

    def loss():
        losses.append(float(nn.functional.mse_loss(model(x).float(), y)))
        return losses[-1]

    optimizer = lc.SeedReplay(
        model, lr=1e-2, eps=1e-1, samples=2, perturb=perturb, codec="none", estimator=estimator, lr_scale="mean"
    )
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            optimizer.step(loss)
        losses.append(float(nn.functional.mse_loss(model(x).float(), y)))
    with torch.autocast("cpu", torch.bfloat16):
        again = float(nn.functional.mse_loss(model(x).float(), y))
    assert losses[-1] == again, "what follows in the region sees the weights as they are"
    return losses


@pytest.mark.parametrize("estimator", ["two-sided", "one-sided"])
def test_autocast_around_steps_hides_no_perturbation(estimator):
    at_use, in_place = (_losses_under_autocast(perturb, estimator) for perturb in ("at-use", "in-place"))
    assert len(set(at_use)) == len(at_use) and at_use == pytest.approx(in_place, rel=1e-3)


PENALTIES = {
    "parameters()": lambda model, kept: sum(p.square().sum() for p in model.parameters()),
    "a list of before": lambda model, kept: sum(p.square().sum() for p in kept),
    "numbers of one": lambda model, kept: kept[0].norm().item() + kept[2].data.norm().item(),
    "attributes": lambda model, kept: model[0].weight.square().sum() + model[2].weight.square().sum(),
}


def _penalised(perturb, penalty, tied=False, late=0, **options):
    """The weights after steps on a loss and, from call `late` on, a penalty."""
    (x, y), model, calls = _data(), _model(tied), 0
    kept = list(model.parameters())

    def loss():
        nonlocal calls
        calls += 1
        data = nn.functional.mse_loss(model(x), y)
        return data if calls <= late else data + 0.1 * PENALTIES[penalty](model, kept)

    optimizer = lc.SeedReplay(model, lr=2e-3, samples=4, perturb=perturb, codec="none", **options)
    for _ in range(20):
        optimizer.step(loss)
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_penalty_is_trained_however_it_reads_the_weights(penalty, tied):
    for mine, paper in zip(*(_penalised(way, penalty, tied) for way in ("at-use", "in-place")), strict=True):
        torch.testing.assert_close(mine, paper, rtol=0, atol=1e-4)


def test_a_penalty_that_begins_later_is_found(caplog):
    with caplog.at_level(logging.INFO, "torch_lowcomm"):
        _penalised("at-use", "parameters()", late=50)
    (said,) = [record.getMessage() for record in caplog.records if "perturbed in place" in record.getMessage()]
    assert "SeedReplay: 4 parameters are read in other ways" in said


def test_what_a_base_has_no_memory_of_is_refused():
    (x, y), model = _data(), _model()
    kept = list(model.parameters())
    optimizer = lc.SeedReplay(model, base="int8", pool=16)
    for _ in range(2):
        with pytest.raises(ValueError, match="got 1 parameters that an evaluation did not read"):
            optimizer.step(lambda: nn.functional.mse_loss(model(x), y) + kept[0].square().sum())
    assert optimizer.iteration == 0
    with pytest.raises(
        ValueError, match="attributes of their modules, got 4 parameters that an evaluation did not read"
    ):
        _penalised("at-use", "parameters()", base="int8", pool=16)


def test_shapes_and_types_are_no_values():
    (x, y), model = _data(), _model()
    first = next(model.parameters())

    def loss():
        assert first.numel() == first.size(0) ** 2 and first.dtype == torch.float32 and first.device.type == "cpu"
        zeros = first.new_zeros(3).sum() + torch.zeros_like(first).sum()
        return nn.functional.mse_loss(model(x.to(first.dtype)), y) + zeros

    optimizer = lc.SeedReplay(model, lr=1e-3, samples=2)
    optimizer.step(loss)
    assert not optimizer._weights.perturbation._in_place
