"""`benchmarks/convergence.py --runs`: what is taken from the folder, and what is not."""

import importlib
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


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

    def run(number):
        return launch.run(process_of, ranks=1, deadline_s=60, number=number)

    kept.choose(tmp_path / "runs")
    first = run(1)
    assert run(1) == first
    assert run(2)[0][1] == 2, "of other arguments"
    monkeypatch.setattr(kept.report, "commit", lambda: "ba9876543210")
    assert run(1) != first, "of another commit"
    kept.choose(None)
    assert run(1) != first
    assert len(list((tmp_path / "runs").iterdir())) == 3


def test_a_changed_tree_keeps_nothing(tmp_path, kept, monkeypatch):
    monkeypatch.setattr(kept.report, "commit", lambda: "0123456789ab+")
    with pytest.raises(ValueError, match="expects a tree without changes, got commit 0123456789ab"):
        kept.choose(tmp_path)
