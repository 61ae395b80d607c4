"""`make gpu-check`: its stages on a GPU where there is one, its dry run and its judgements everywhere."""

import json
import shutil
import subprocess

import pytest
from gpu_check import carry, check, cli, reports, steps
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


def _fails(place):
    raise steps.StepFailed("expected 1, got 2", {"found": 2})


def test_a_failing_step_is_told_and_keeps_no_other_from_being_performed(tmp_path, monkeypatch):
    for name, step in {"build": _fails, "perf": lambda place: {"rows": 3}}.items():
        monkeypatch.setitem(steps.STEPS, name, step)
    assert cli.main(["--steps", "build perf", "--out", str(tmp_path)]) == 1
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert {name: step["ok"] for name, step in report["steps"].items()} == {"build": False, "perf": True}
    assert report["steps"]["build"]["why"] == "expected 1, got 2"
    assert report["steps"]["build"]["facts"] == {"found": 2}
    assert report["ok"] is False
    # A second call performs only the steps that it names, and the report keeps the others.
    monkeypatch.setitem(steps.STEPS, "build", lambda place: None)
    assert cli.main(["--steps", "build", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert report["ok"] is True
    assert report["steps"]["perf"]["facts"] == {"rows": 3}


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


def test_rows_below_their_bound_are_facts_and_other_values_are_failures(tmp_path):
    row = {"codec": "sym4", "dtype": "float32", "loop": "encode", "percent_of_copy": 70.0, "bound": 80}
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"rows": [row | {"pass": False, "same_as_host": True}]}))
    assert reports.kernel_speed(path) == ({"rows": 1, "below_their_bound": {"sym4 float32 encode": [70.0, 80]}}, [])
    path.write_text(json.dumps({"rows": [row | {"pass": False, "same_as_host": False}]}))
    assert reports.kernel_speed(path)[1] == ["sym4 float32 encode: expected the host's values, got others"]
    path.write_text(json.dumps({"rows": []}))
    assert reports.kernel_speed(path)[1] == ["expected rows, got none: cuda_perf found no GPU"]


def _suite(*tests):
    return json.dumps({"testsuites": [{"testsuite": [{"classname": "CudaGrid", "status": "RUN", **t} for t in tests]}]})


def test_shards_that_fail_or_vanish_are_told(tmp_path):
    shards = [tmp_path / f"shard{i}.json" for i in range(2)]
    shards[0].write_text(_suite({"name": "A", "result": "COMPLETED"}, {"name": "B", "result": "SKIPPED"}))
    shards[1].write_text(_suite({"name": "C", "result": "COMPLETED", "failures": [{"failure": "1 is not 2"}]}))
    counts, wrong = reports.unit_tests(shards)
    assert counts == {"passed": 1, "skipped": 1, "failed": 1}
    assert wrong == ["CudaGrid.C: 1 is not 2"]
    shards[1].unlink()
    assert reports.unit_tests(shards)[1] == ["shard1: expected a report, got none: it ended before its last test"]
    shards[0].write_text(_suite({"name": "B", "result": "SKIPPED"}))
    assert reports.unit_tests(shards[:1])[1] == ["expected tests that pass, got none and 1 that were skipped"]
