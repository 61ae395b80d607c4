"""The gate on pipelines that learn to read their messages' rounding: training looks better than exact, validation is worse."""

import importlib

import pytest


def run(training, validation):
    return {"loss": [9.0, training], "validation": validation}


@pytest.mark.parametrize(
    ("training", "validation", "flattered"),
    [
        ((1.818, 1.818), (3.184, 3.184), 1),  # gauss4 whose blocks span four tokens
        ((1.853, 1.853), (1.82, 1.82), 1),
        ((1.875, 1.875), (1.792, 1.792), 0),
        ((1.9, 1.9), (3.2, 3.2), 0),  # bad, and says so
        ((1.80, 1.80), (1.80, 1.80), 0),
        ((1.86, 1.80), (1.777, 1.90), 1),  # means over seeds
    ],
)
def test_a_run_that_reads_its_rounding_fails(training, validation, flattered, capsys):
    flattery = importlib.import_module("convergence.flattery")
    runs = {"exact": [run(1.853, 1.777)] * 3, "coded": list(map(run, training, validation))}
    gate = flattery.gate(runs, lambda _: "exact")
    assert (gate.value, gate.passed) == (flattered, not flattered)
    assert ("coded reads its messages' rounding" in capsys.readouterr().out) == bool(flattered)
    assert flattery.gate({"coded": runs["coded"]}, lambda _: "exact").passed, "there is nothing to compare it with"


def test_runs_are_compared_with_exact_ones_that_are_otherwise_alike():
    gates, presets = (importlib.import_module(f"convergence.pipeline.{name}") for name in ("gates", "presets"))
    runs = importlib.import_module("convergence.pipeline.runs")
    every = {name: c for part in runs.PARTS.values() for name, c in part.items()}
    assert len(every) == sum(map(len, runs.PARTS.values())), "names are of one part"
    for name, c in every.items():
        exact = every[gates.baseline(name, every)]
        assert not exact.codecs and not exact.store
        for setting in ("pretrain", "lr", "samples", "epochs", "point"):
            assert getattr(exact, setting) == getattr(c, setting), name
    for part in (presets.FINE_TUNING, presets.FRESH):
        assert {c.stages for c in part.values()} == {2, 4}
        assert all(part[gates.baseline(name, part)].stages == c.stages for name, c in part.items())
