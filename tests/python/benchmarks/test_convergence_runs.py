"""`python benchmarks convergence --runs`: what is taken from the folder, and what is not."""

import importlib
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def kept(monkeypatch):
    """The module, whose folder is forgotten after the test; the tree is taken for one without changes."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    module = importlib.import_module("kept")
    monkeypatch.setattr(module.report, "commit", lambda: "0123456789ab")
    yield module
    module.choose(None)


def process_of(rank, init_method, *, number):
    """Another at every call."""
    return os.getpid(), number


def test_a_run_that_is_kept_is_not_done_again(tmp_path, kept, monkeypatch):
    launch = importlib.import_module("launch")

    def run():
        return launch.run(process_of, ranks=1, deadline_s=60, number=1)

    kept.choose(tmp_path / "runs")
    first = run()
    assert run() == first and first[0][1] == 1
    file = kept.file_of(process_of, 1, {"number": 1})
    assert list((tmp_path / "runs").iterdir()) == [file]
    assert kept.file_of(process_of, 1, {"number": 2}) != file
    assert kept.file_of(process_of, 2, {"number": 1}) != file
    monkeypatch.setattr(kept.report, "commit", lambda: "ba9876543210")
    assert kept.file_of(process_of, 1, {"number": 1}) != file, "of another commit"
    kept.choose(None)
    assert kept.file_of(process_of, 1, {"number": 1}) is None


def test_another_text_is_another_run(tmp_path, kept):
    text = importlib.import_module("text")
    kept.choose(tmp_path / "runs")
    files = {kept.file_of(process_of, 1, {})}
    try:
        for words in ("one text. ", "another. "):
            (tmp_path / "a.txt").write_text(words * 300)
            text.choose(tmp_path / "a.txt")
            files.add(kept.file_of(process_of, 1, {}))
    finally:
        text.choose(None)
    assert len(files) == 3


def test_a_changed_tree_keeps_nothing(tmp_path, kept, monkeypatch):
    monkeypatch.setattr(kept.report, "commit", lambda: "0123456789ab+")
    with pytest.raises(ValueError, match="expects a tree without changes, got commit 0123456789ab"):
        kept.choose(tmp_path)


def test_a_long_curve_is_thinned_to_its_ends_and_means(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    cli = importlib.import_module("convergence.cli")
    long = {"name": "a", "step": list(range(1, 252)), "loss": [float(i) for i in range(251)], "gates": [1, 2]}
    thin = cli.thinned(long)
    assert thin["step"] == [*range(1, 251, 3), 251] and len(thin["step"]) == 85 <= cli.POINTS
    assert thin["loss"][:3] == [0.0, 2.0, 5.0] and thin["loss"][-1] == 250.0
    assert thin["name"] == "a" and thin["gates"] == [1, 2]
    assert cli.thinned(thin) == thin, "a short curve stays as it is"
