"""The example and the convergence benchmark, run as a user runs them, at 2 ranks."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRAIN = [str(ROOT / "examples" / "train_fsdp.py"), "--batch", "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(command, *, deadline_s, cwd):
    """Runs command in a session of its own and ends it by its id when the deadline passes.

    torchrun's workers have sessions of their own: a SIGTERM lets it end them first.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                out, err = process.communicate(timeout=40)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                out, err = process.communicate()
            pytest.fail(f"expected {command} to finish within {deadline_s} s\n{out}\n{err}")
    return process.returncode, out, err


def train(directory, *arguments):
    """Runs the example in directory and returns its output and the runs of its JSON by name."""
    file = directory / "run.json"
    status, out, err = run([*TORCHRUN, *TRAIN, "--json", str(file), *arguments], deadline_s=240, cwd=directory)
    assert status == 0, f"{out}\n{err}"
    exact, quantized = json.loads(file.read_text())
    return out, {"exact": exact, "quantized": quantized}


@pytest.mark.slow
def test_example_trains_reports_and_resumes(tmp_path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    whole.mkdir()
    halves.mkdir()
    out, uninterrupted = train(whole, "--steps", "12")

    rows = {line[:38].strip(): line[38:].split() for line in out.splitlines() if len(line) > 38}
    assert rows["steps"] == ["12", "12"]
    assert re.fullmatch(r"[\d.]+×", rows["weights sent by a rank, MB"][2])
    for run_ in uninterrupted.values():
        assert len(run_["loss"]) == 12
        assert run_["loss"][-1] < run_["loss"][0] - 0.5
    exact, quantized = uninterrupted["exact"], uninterrupted["quantized"]
    assert exact["weights_bytes"] >= 3.9 * quantized["weights_bytes"] > 0
    assert exact["gradients_bytes"] >= 3.9 * quantized["gradients_bytes"] > 0
    assert exact["loss"][0] == pytest.approx(quantized["loss"][0], abs=0.05)
    assert (whole / "runs" / "train_fsdp.png").read_bytes().startswith(b"\x89PNG")

    _, first = train(halves, "--steps", "7", "--checkpoint", "saved")
    out, second = train(halves, "--steps", "12", "--checkpoint", "saved", "--resume")
    assert "7+5" in out
    for name, run_ in uninterrupted.items():
        assert first[name]["loss"] + second[name]["loss"] == run_["loss"], name
        assert second[name]["perplexity"] == run_["perplexity"], name


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--steps", "0"], "--steps expects a positive number, got 0"),
        (["--weights", "zip9"], "zip9"),
        (["--gradients", "qsgd9"], "qsgd9"),
        (["--data", "nowhere"], "--data expects a file or a directory, got nowhere"),
        (["--data", "short.txt"], "--data expects at least 1300 bytes of text, got 5"),
        (["--resume"], "--resume expects --checkpoint DIR"),
        (["--resume", "--checkpoint", "nowhere"], "--resume expects a checkpoint in nowhere/exact, got none"),
        (["--backend", "gloo"], "--backend gloo expects --only exact"),
        ([], "expected to be started by torchrun"),
    ],
)
def test_example_refuses_in_one_sentence(tmp_path, arguments, expected):
    (tmp_path / "short.txt").write_text("short")
    status, out, err = run([sys.executable, *TRAIN, *arguments], deadline_s=120, cwd=tmp_path)
    assert status == 1
    assert out == ""
    assert err.startswith("train_fsdp.py: ")
    assert expected in err
    assert err.count("\n") == 1, err


def test_example_refuses_once_for_all_ranks(tmp_path):
    status, _, err = run([*TORCHRUN, *TRAIN, "--steps", "-1"], deadline_s=120, cwd=tmp_path)
    assert status != 0
    assert err.count("--steps expects a positive number, got -1") == 1, err


@pytest.mark.slow
def test_convergence_quick(tmp_path):
    file, picture = tmp_path / "qsdp.json", tmp_path / "qsdp.png"
    script = str(ROOT / "benchmarks" / "convergence.py")
    command = [sys.executable, script, "qsdp", "--quick", "--json", str(file), "--plot", str(picture)]
    status, out, err = run(command, deadline_s=600, cwd=tmp_path)
    assert status == 0, f"{out}\n{err}"
    content = json.loads(file.read_text())
    assert len(content["gates"]) == 5
    assert all(gate["pass"] for gate in content["gates"])
    assert {"python", "torch", "torch_lowcomm"} <= content["versions"].keys()
    for curve in content["curves"]:
        assert len(curve["step"]) == len(curve["bytes"]) == len(curve["seconds"]) == len(curve["loss"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_convergence_refuses_unknown_method(tmp_path):
    script = str(ROOT / "benchmarks" / "convergence.py")
    status, _, err = run([sys.executable, script, "zip"], deadline_s=120, cwd=tmp_path)
    assert status == 2
    assert "expected one of qsdp, got 'zip'" in err
