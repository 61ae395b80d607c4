"""`make gpu-check`: its stages on a GPU where there is one, its dry run and its judgements everywhere."""

import json
import shutil
import subprocess

import pytest
from gpu_check import carry, check, cli, steps
from gpu_check.marks import on_a_gpu
from gpu_check.stages import STAGES


@on_a_gpu
@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_on_one_gpu(stage):
    check.perform(stage, "cuda")


@pytest.mark.later
def test_the_dry_run(tmp_path):
    assert cli.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert report["ok"] is True
    stages = report["steps"]["python"]["facts"]["stages"]
    assert tuple(stages) == STAGES
    assert all(stage["ok"] for stage in stages.values()), stages
    assert stages["staged"]["facts"]["compared"] > 0


@pytest.mark.later
def test_the_dry_training(tmp_path, monkeypatch):
    monkeypatch.setenv("SECONDS_A_RUN", "5")
    assert cli.main(["--device", "cpu", "--steps", "train", "--out", str(tmp_path)]) == 0
    facts = json.loads((tmp_path / "gpu_check.json").read_text())["steps"]["train"]["facts"]
    assert list(facts) == ["exact", "8 bits", "DiLoCoX"]
    for run in facts.values():
        assert all(step % 10 == 0 and seconds > 0 for seconds, step, _ in run["curve"])


def test_what_is_carried_is_used_and_not_built(tmp_path, monkeypatch):
    build, package = tmp_path / "build", tmp_path / "package"
    (build / carry.EXTENSION).mkdir(parents=True)
    package.mkdir()
    for name in (*carry.PROGRAMS, carry.EXTENSION / "_C.test.so"):
        shutil.copy2(shutil.which("true"), build / name)
    with pytest.raises(ValueError, match="_build_info.py, got no such file"):
        carry.pack(build, tmp_path / "carried")
    (build / carry.EXTENSION / "_build_info.py").write_text("A = 1\n")
    assert 0 < carry.pack(build, tmp_path / "carried") < 1 << 20
    carry.unpack(tmp_path / "carried", package, tmp_path / "programs")
    assert (package / "_build_info.py").read_text() == "A = 1\n"
    assert subprocess.run([tmp_path / "programs" / "cuda_tests"], check=True).returncode == 0
    monkeypatch.setattr(steps, "UNPACKED", tmp_path / "programs")
    for program in carry.PROGRAMS:
        assert steps._made(steps.Place(tmp_path), "log", program, 5) == tmp_path / "programs" / program
    monkeypatch.setattr(carry, "MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="expected at most 0 MiB, got"):
        carry.pack(build, tmp_path / "carried")


def test_steps_that_need_a_gpu_are_refused_in_the_dry_run(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["--device", "cpu", "--steps", "python perf", "--out", str(tmp_path)])
    assert "expected some of python train with device cpu, got perf" in capsys.readouterr().err
