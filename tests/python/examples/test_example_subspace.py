"""examples/train_subspace.py at 2 ranks."""

import json
import math

import pytest
import ranks
from example_main import refusal, run_main

QUICK = ["--steps", "30", "--batch", "8"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "fewer"),
    [
        (["--rank", "32"], 3.5),
        (["--rank", "16", "--kind", "projection", "--coefficients", "minmax8:bucket=128"], 15),
        (["--kind", "coded", "--coefficients", "gauss4"], 6.5),
    ],
    ids=["constrained", "projection", "coded"],
)
def test_example_trains(tmp_path, arguments, fewer):
    """Both runs learn, and the second one sends so many times fewer bytes, frames included; the plot is drawn."""
    outputs = []
    ranks.run_ranks(run_main, 2, "train_subspace", str(tmp_path), [*QUICK, *arguments], timeout=180, outputs=outputs)
    free, other = json.loads((tmp_path / "run.json").read_text())
    for run in (free, other):
        assert run["loss"][-1] < run["loss"][0] - 0.5
        assert math.isfinite(run["perplexity"])
    assert free["token_bytes"] > 512
    assert free["sent_bytes"][-1] > fewer * other["sent_bytes"][-1]
    assert "bytes a token" in outputs[1]
    assert (tmp_path / "runs" / "train_subspace.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--steps", "0"], "--steps expects a positive number, got 0"),
        (["--batch", "6"], "--batch expects a multiple of --micro-batches, got 6 and 4"),
        (["--rank", "129", "--batch", "8"], "--rank expects 1...128, the model's width, got 129"),
        (["--coefficients", "zip9", "--batch", "8"], "zip9"),
        (["--kind", "coded", "--batch", "8"], "--kind coded expects --coefficients CODEC, got fp32"),
        (["--batch", "8"], "expected to be started by torchrun"),
    ],
)
def test_example_refuses_in_one_sentence(tmp_path, monkeypatch, capsys, arguments, expected):
    monkeypatch.chdir(tmp_path)
    assert expected in refusal("train_subspace", arguments, monkeypatch, capsys)
