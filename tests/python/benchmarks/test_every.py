"""`make bench` runs what benchmarks/README.md lists, and that is every program there is."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import every
import pytest

BENCHMARKS = Path(every.__file__).parent
NOT_LISTED = {"every", "pages", "convergence", "linklab"}  # what runs and checks the others, and programs with parts


def programs():
    spec = importlib.util.spec_from_file_location("programs", BENCHMARKS / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return set(module.PROGRAMS)


def test_every_program_is_listed_and_every_listed_one_is_there():
    methods = importlib.import_module("convergence.cli").METHODS
    commands = every.commands()
    assert len(commands) == len(set(commands))
    listed = {command.split()[0] for command in commands if not command.startswith("make ")}
    assert listed - NOT_LISTED == programs() - NOT_LISTED
    assert {command.split()[1] for command in commands if command.startswith("convergence ")} == set(methods)
    assert "make bench-codec" in commands


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_bench_runs_them():
    told = subprocess.run(
        ["make", "-n", "--no-print-directory", "bench", "ONLY=aq"],
        cwd=BENCHMARKS.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.rstrip().endswith("python benchmarks every aq")
    targets = [command.split()[1] for command in every.commands() if command.startswith("make ")]
    subprocess.run(["make", "-n", *targets], cwd=BENCHMARKS.parent, capture_output=True, check=True)


def test_the_first_cells_are_commands():
    page = "| program | question |\n| --- | --- |\n| `a b`, `make c` (`make d`) | What does `e` do? |\n| f (by `make g`) | ? |\n"
    assert every.commands(page) == ["a b", "make c"]


def test_a_program_that_fails_is_named(capfd, monkeypatch):
    monkeypatch.setattr(every, "commands", lambda: ["convergence nothing", "pages"])
    monkeypatch.setattr(sys, "argv", ["every", "nothing"])
    assert every.main() == 1
    assert "failed  convergence nothing" in capfd.readouterr().out
