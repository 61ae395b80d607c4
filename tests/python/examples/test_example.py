"""The example and the convergence benchmark at 2 ranks: each once as a user runs it, the rest in cheaper processes."""

import json
import re
from pathlib import Path

import pytest
import ranks
from example_main import run_example

ROOT = Path(__file__).resolve().parents[3]
TRAIN = [str(ROOT / "examples" / "train_fsdp.py"), "--batch", "2"]
TORCHRUN = ranks.torchrun(2, "--standalone")


def runs_in(file):
    """The runs of the example's JSON by name."""
    found = json.loads(file.read_text())
    return {"exact" if run_["label"] == "exact" else "quantized": run_ for run_ in found}


@pytest.mark.slow
def test_example_trains_and_reports(tmp_path):
    command = [*TORCHRUN, *TRAIN, "--steps", "8", "--json", "run.json"]
    status, out, err = ranks.run_command(command, deadline_s=240, cwd=tmp_path)
    assert status == 0, f"{out}\n{err}"

    rows = {line[:38].strip(): line[38:].split() for line in out.splitlines() if len(line) > 38}
    assert rows["steps"] == ["8", "8"]
    assert re.fullmatch(r"[\d.]+×", rows["weights sent by a rank, MB"][2])
    runs = runs_in(tmp_path / "run.json")
    for run_ in runs.values():
        assert len(run_["loss"]) == 8
        assert run_["loss"][-1] < run_["loss"][0] - 0.5
    exact, quantized = runs["exact"], runs["quantized"]
    assert exact["weights_bytes"] >= 3.9 * quantized["weights_bytes"] > 0
    assert exact["gradients_bytes"] >= 3.9 * quantized["gradients_bytes"] > 0
    assert exact["loss"][0] == pytest.approx(quantized["loss"][0], abs=0.05)
    assert (tmp_path / "runs" / "train_fsdp.png").read_bytes().startswith(b"\x89PNG")


def train(directory, *arguments):
    """Runs the example in fresh ranks and returns its output and its runs by name."""
    outputs, _ = run_example("train_fsdp", directory, *arguments)
    return outputs[0], runs_in(directory / "run.json")


@pytest.mark.slow
def test_example_resumes_as_if_never_interrupted(tmp_path):
    """Weights and gradients both rounded at random: a draw that is off by one shows in the loss."""
    codec = ["--weights", "qsgd8:bucket=1024"]
    _, uninterrupted = train(tmp_path, "--steps", "5", *codec)
    _, first = train(tmp_path, "--steps", "3", "--checkpoint", "saved", *codec)
    out, second = train(tmp_path, "--steps", "5", "--checkpoint", "saved", "--resume", *codec)
    assert "3+2" in out
    assert uninterrupted.keys() == {"exact", "quantized"}
    for name, run_ in uninterrupted.items():
        assert first[name]["loss"] + second[name]["loss"] == run_["loss"], name
        assert second[name]["perplexity"] == run_["perplexity"], name


@pytest.mark.slow
def test_example_refuses_once_for_all_ranks(tmp_path):
    status, _, err = ranks.run_command([*TORCHRUN, *TRAIN, "--steps", "-1"], deadline_s=120, cwd=tmp_path)
    assert status != 0
    assert err.count("--steps expects a positive number, got -1") == 1, err
