"""examples/train_ddp.py and `python benchmarks convergence ddp` at 2 ranks."""

from pathlib import Path

import pytest
from example_main import run_example

ROOT = Path(__file__).resolve().parents[3]


def train(directory, *arguments):
    """Runs the example in fresh ranks and returns its output and its runs by name."""
    outputs, runs = run_example("train_ddp", directory, *arguments)
    return outputs[0], dict(zip(("exact", "coded", "low rank"), runs, strict=True))


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
