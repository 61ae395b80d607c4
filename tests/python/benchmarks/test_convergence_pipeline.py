"""`python benchmarks convergence aq` at 4 ranks, and how it cuts its model and counts."""

import importlib
from pathlib import Path

import pytest
import torch
from example_main import quick_convergence
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_convergence_quick(tmp_path):
    content = quick_convergence("aq", 7, tmp_path)
    runs = {run["name"]: run for run in content["curves"]}
    assert runs["exact"]["cache_bytes"] == 0 < runs["AQ gauss2/gauss4"]["cache_bytes"]
    assert 32 <= runs["exact"]["forward_bits"] < 32.3, "the frames of a boundary and nothing else"


@pytest.mark.slow
def test_replicas_quick(tmp_path):
    content = quick_convergence("aq_replicas", 1, tmp_path)
    runs = {run["name"]: run for run in content["curves"]}
    exact, coded = runs["exact"], runs["AQ gauss2/gauss4, QuantizedAdam"]
    assert exact["coded"] == 0 < runs["AQ gauss2/gauss4"]["coded"] < 0.1, "parameters' gradients are most of it"
    assert exact["replicas_bits"] == 32
    # A quarter of its steps are QuantizedAdam's warm-up.
    assert coded["replicas_bits"] == pytest.approx((32 + 3 * 4.03) / 4, rel=0.01)
    assert coded["coded"] == pytest.approx(1 - 8 / coded["replicas_bits"], abs=0.05)
    assert coded["loss"][-1] < 1.03 * exact["loss"][-1]


@pytest.mark.parametrize("count", [2, 4, 8])
def test_stages_are_the_whole_model(count):
    model, parts = importlib.import_module("model"), importlib.import_module("convergence.pipeline.parts")
    torch.manual_seed(0)
    gpt = model.GPT()
    x, y = torch.randint(model.VOCABULARY, (2, 3, 64))
    activations = x
    stages = [parts.part(gpt, index, count) for index in range(count)]
    for stage in stages:
        activations = stage(activations)
    loss = functional.cross_entropy(activations.flatten(0, 1), y.flatten())
    assert torch.equal(loss, gpt(x, y))
    assert sum(p.numel() for stage in stages for p in stage.parameters()) == sum(p.numel() for p in gpt.parameters())


def test_changes_are_those_of_all_boundaries():
    runs = importlib.import_module("convergence.pipeline.runs")
    ranks = [{"mean_value": 3.0, "mean_change": 0.5}, {"mean_value": 1.0, "mean_change": 0.5}, {"forward": 0.0}]
    assert runs.changes(ranks) == 0.25
    assert runs.changes(ranks[2:]) is None


def test_runs_are_compared_with_exact_ones_that_are_otherwise_alike():
    gates, presets = (importlib.import_module(f"convergence.pipeline.{name}") for name in ("gates", "presets"))
    every = presets.CLAIMS | presets.VARIANTS | presets.STAGES | presets.TWO_BITS
    for name, c in every.items():
        exact = every[gates.baseline(name)]
        assert not exact.codecs and not exact.store
        for setting in ("shuffle", "noise", "dtype", "pretrain", "lr", "samples", "epochs"):
            assert getattr(exact, setting) == getattr(c, setting), name
