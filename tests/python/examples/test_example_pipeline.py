"""examples/train_pipeline.py at 2 ranks."""

import math

import pytest
from example_main import run_example

QUICK = ["--samples", "32", "--epochs", "3", "--pretrain", "5", "--batch", "8", "--lr", "1e-3"]


@pytest.mark.slow
def test_example_trains(tmp_path):
    """Both runs learn, coded ones nearly as exact ones, by a sixth of the bytes; the plot is drawn."""
    cache = ["--cache", str(tmp_path / "slots")]
    outputs, (exact, coded) = run_example("train_pipeline", tmp_path, *QUICK, *cache)
    for run in (exact, coded):
        assert run["loss"][-1] < run["loss"][0] - 0.1
        assert math.isfinite(run["perplexity"])
    assert abs(coded["loss"][-1] - exact["loss"][-1]) < 0.05
    assert exact["sent_bytes"][-1] > 6 * coded["sent_bytes"][-1]
    assert coded["cache_bytes"] == 32 * 64 * 128 * 2
    assert (tmp_path / "slots" / "rank0" / "0.0.sent.slots").stat().st_size > coded["cache_bytes"]
    assert "fewer bytes, times" in outputs[1]
    assert (tmp_path / "runs" / "train_pipeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["quantized_adam", "diloco"])
def test_example_trains_replicas(tmp_path, optimizer):
    """Two replicas of two stages: the coded run sends a fourth of the exact one's bytes or less, averages included."""
    arguments = [*QUICK, "--samples", "64", "--replicas", "2", "--optimizer", optimizer, "--sync-every", "4"]
    _, (exact, coded) = run_example("train_pipeline", tmp_path, *arguments, size=4, timeout=240)
    for run in (exact, coded):
        assert run["loss"][-1] < run["loss"][0] - 0.1
    assert abs(coded["loss"][-1] - exact["loss"][-1]) < 0.1
    assert exact["sent_bytes"][-1] > (3 if optimizer == "quantized_adam" else 8) * coded["sent_bytes"][-1]
