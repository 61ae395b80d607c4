"""`python benchmarks convergence --data`: which text every rank of a method trains on, and what is refused."""

import hashlib
import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SENTENCE = b"The quick brown fox jumps over the lazy dog. "


@pytest.fixture
def convergence(monkeypatch):
    """A function: main() with a command line; what was chosen by it is forgotten after the test."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    program, text = importlib.import_module("convergence.cli"), importlib.import_module("text")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["benchmarks convergence", *map(str, arguments)])
        return program.main()

    yield run
    text.choose(None)


def beginning(rank, init_method):
    """Returns the beginning of a rank's text; the rank is another process."""
    return bytes(importlib.import_module("text").load().train[: len(SENTENCE)].tolist()).decode()


def test_every_rank_reads_the_text(tmp_path, convergence):
    file = tmp_path / "fox.txt"
    file.write_bytes(SENTENCE * 100)
    text, launch = importlib.import_module("text"), importlib.import_module("launch")
    text.choose(file)
    assert launch.run(beginning, ranks=2, deadline_s=60) == [SENTENCE.decode()] * 2
    digest = hashlib.sha256(SENTENCE * 100).hexdigest()[:32]
    assert text.about() == {"name": "fox.txt", "bytes": 100 * len(SENTENCE), "sha256": digest}
    text.choose(None)
    assert text.about()["name"].startswith("Python ") and text.about()["bytes"] == 4_000_000


def test_no_rank_reads_another_text():
    """Every run of the convergence program takes its text from text.py."""
    benchmarks = ROOT / "benchmarks"
    files = [file for folder in (".", "convergence", "steps") for file in (benchmarks / folder).rglob("*.py")]
    others = {
        "codec/errors.py",
        "steps/overlap.py",
        "seed_replay/cost.py",
        "seed_replay/base_rank.py",
        "diloco/throughput_rank.py",
        "diloco/rank.py",
        "convergence/pretrained_rank.py",
        "text.py",
    }  # separate programs, and text.py
    reading = {str(file.relative_to(benchmarks)) for file in files if "data.load(" in file.read_text()}
    assert reading <= others


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fsdp", "--data", "nowhere"], "--data expects a file or a directory, got"),
        (
            ["seed_replay", "--data", "fox.txt"],
            "expected a method that trains on a text, got seed_replay, which has none",
        ),
        (["fsdp", "--only", "timing"], "--only: expected none of fsdp, got 'timing'"),
        (["fsdp_variants", "--only", "time"], "--only: expected training or timing or accumulation, got 'time'"),
    ],
)
def test_what_is_refused(convergence, capsys, arguments, said):
    with pytest.raises(SystemExit) as refusal:
        convergence(*arguments)
    assert refusal.value.code == 2
    assert said in capsys.readouterr().err


def test_too_little_text_is_refused(tmp_path, convergence, capsys):
    (tmp_path / "short.txt").write_bytes(SENTENCE)
    with pytest.raises(SystemExit):
        convergence("ddp", "--data", tmp_path / "short.txt")
    assert "--data expects at least 1300 bytes of text, got 45" in capsys.readouterr().err
