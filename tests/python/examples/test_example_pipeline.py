"""examples/train_pipeline.py at 2 ranks."""

import json
import math
from pathlib import Path

import pytest
import ranks
from example_main import refusal, run_main

ROOT = Path(__file__).resolve().parents[3]
QUICK = ["--samples", "32", "--epochs", "3", "--pretrain", "5", "--batch", "8", "--lr", "1e-3"]


@pytest.mark.slow
def test_example_trains(tmp_path):
    """Both runs learn, coded ones nearly as exact ones, by a sixth of the bytes; the plot is drawn."""
    outputs = []
    arguments = [*QUICK, "--cache", str(tmp_path / "slots")]
    ranks.run_ranks(run_main, 2, "train_pipeline", str(tmp_path), arguments, timeout=180, outputs=outputs)
    exact, coded = json.loads((tmp_path / "run.json").read_text())
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
    ranks.run_ranks(run_main, 4, "train_pipeline", str(tmp_path), arguments, timeout=240)
    exact, coded = json.loads((tmp_path / "run.json").read_text())
    for run in (exact, coded):
        assert run["loss"][-1] < run["loss"][0] - 0.1
    assert abs(coded["loss"][-1] - exact["loss"][-1]) < 0.1
    assert exact["sent_bytes"][-1] > (3 if optimizer == "quantized_adam" else 8) * coded["sent_bytes"][-1]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--epochs", "0", "--batch", "8"], "--epochs expects a positive number, got 0"),
        (["--batch", "6"], "--batch expects a multiple of --micro-batches, got 6 and 4"),
        (["--forward", "zip9", "--batch", "8"], "zip9"),
        (["--batch", "8", "--optimizer", "diloco"], "--optimizer diloco expects --replicas 2 or more, got 1"),
        (
            ["--batch", "16", "--samples", "16", "--replicas", "2"],
            "--samples expects a batch of 16 for each of 2 replicas, got 16",
        ),
        (["--batch", "8"], "expected to be started by torchrun"),
    ],
)
def test_example_refuses_in_one_sentence(tmp_path, monkeypatch, capsys, arguments, expected):
    monkeypatch.chdir(tmp_path)
    assert expected in refusal("train_pipeline", arguments, monkeypatch, capsys)
