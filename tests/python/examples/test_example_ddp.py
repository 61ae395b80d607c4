"""examples/train_ddp.py and `python benchmarks convergence ddp` at 2 ranks."""

import json
from pathlib import Path

import pytest
import ranks
from example_main import quick_convergence, refusal, run_main

ROOT = Path(__file__).resolve().parents[3]
TRAIN = [str(ROOT / "examples" / "train_ddp.py"), "--batch", "2"]


def train(directory, *arguments):
    """Runs the example in fresh ranks and returns its output and its runs by name."""
    outputs = []
    ranks.run_ranks(run_main, 2, "train_ddp", str(directory), arguments, timeout=180, outputs=outputs)
    names = ["exact", "coded", "low rank"]
    return outputs[0], dict(zip(names, json.loads((directory / "run.json").read_text()), strict=True))


@pytest.mark.slow
def test_example_trains_and_resumes(tmp_path):
    """Rounded at random: a draw that is off by one shows in the loss. The plot is drawn, bytes are counted."""
    codec = ["--codec", "qsgd4:bucket=128", "--projection-codec", "qsgd8:bucket=128", "--rank", "4"]
    out, uninterrupted = train(tmp_path, "--steps", "6", *codec)
    _, first = train(tmp_path, "--steps", "4", "--checkpoint", "saved", *codec)
    again, second = train(tmp_path, "--steps", "6", "--checkpoint", "saved", "--resume", *codec)
    assert "4+2" in again
    for name, run in uninterrupted.items():
        assert first[name]["loss"] + second[name]["loss"] == run["loss"], name
        assert second[name]["perplexity"] == run["perplexity"], name
        assert run["loss"][-1] < run["loss"][0] - 0.1
    sent = {name: run["sent_bytes"][-1] for name, run in uninterrupted.items()}
    assert sent["exact"] > 7 * sent["coded"] > 50 * sent["low rank"]
    assert "fewer bytes, times" in out
    assert (tmp_path / "runs" / "train_ddp.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--steps", "0"], "--steps expects a positive number, got 0"),
        (["--rank", "-2"], "--rank expects a positive number, got -2"),
        (["--codec", "zip9"], "zip9"),
        (["--projection-codec", "zip8"], "zip8"),
        (["--resume"], "--resume expects --checkpoint DIR"),
        (["--resume", "--checkpoint", "nowhere"], "--resume expects nowhere/exact/rank0.pt, found none"),
        (["--device", "cuda"], "--device cuda expects a GPU, got none"),
        ([], "expected to be started by torchrun"),
    ],
)
def test_example_refuses_in_one_sentence(tmp_path, monkeypatch, capsys, arguments, expected):
    monkeypatch.chdir(tmp_path)
    assert expected in refusal("train_ddp", arguments, monkeypatch, capsys)


@pytest.mark.slow
def test_convergence_quick(tmp_path):
    quick_convergence("ddp", 9, tmp_path)
