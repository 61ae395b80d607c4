"""Measured figures on the pages: they are those of the results, and results say what was measured."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import figures  # noqa: E402
import report  # noqa: E402

README = (ROOT / "README.md").read_text()
BENCHMARKS = (ROOT / "benchmarks" / "README.md").read_text()


def test_the_pages_figures_are_the_results():
    assert not list(figures.wrong_in_readme(README))
    assert not list(figures.wrong_in_benchmarks(BENCHMARKS))
    assert not figures.unmeasured(README)


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ("| 5.494 | 5.487 |", "| 5.494 | 5.486 |"),
        ("1287.2 MB", "1278.2 MB"),
        ("3.95×", "3.96×"),
        ("| .96 | 10.4× |", "| .96 | 10.5× |"),
        ("+.0045 ± .0018", "+.0045 ± .0013"),
        ("| 1.858 | 2.3 MB | 372× |", "| 1.858 | 2.3 MB | 373× |"),
    ],
)
def test_a_wrong_figure_of_the_readme_is_named(was, becomes):
    assert was in README
    assert list(figures.wrong_in_readme(README.replace(was, becomes)))


def test_what_nothing_compares_is_named():
    row = "| another codec | 5.021 | ratio 0.9 ± .1 |"
    assert figures.unmeasured(f"{README}\n{row}\n") == [row]
    gate = re.search(r"^PASS  perplexity ratio W8G8 .*$", BENCHMARKS, re.MULTILINE)[0]
    (said,) = figures.wrong_in_benchmarks(BENCHMARKS.replace(gate, gate.replace("0.9987", "0.9986")))
    assert "convergence qsdp" in said and "qsdp.json" in said


def test_a_wrong_row_is_named():
    (said,) = figures.wrong_in_benchmarks(BENCHMARKS.replace(" 1512.76 ", " 1512.96 "))
    assert "# linklab standard" in said and "1512.96" in said


@pytest.mark.parametrize("path", sorted(figures.RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_result_says_which_code_was_measured(path):
    versions = json.loads(path.read_text())["versions"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", versions["torch_lowcomm"])
    commits = versions.get("commit") or versions["recorded_in"]
    assert re.fullmatch(r"[0-9a-f]{12}(\+|, [0-9a-f]{12})?", commits)


def test_programs_write_the_commit(tmp_path):
    """Those in Python by one function; what a C++ program has written is stamped."""
    report.finish([report.Gate("a gate", 1.0, "<", 2.0)], tmp_path / "a.json", {"rows": []})
    (tmp_path / "b.json").write_text('{"rows": [1], "gates": []}')
    report.stamp(tmp_path / "b.json")
    for name in ("a", "b"):
        content = json.loads((tmp_path / f"{name}.json").read_text())
        assert content["versions"]["commit"] == report.commit() and "torch_lowcomm" in content["versions"]
    assert re.fullmatch(r"[0-9a-f]{12}\+?|none", report.commit())
    programs = [path for path in (ROOT / "benchmarks").rglob("*.py") if '"gates":' in path.read_text()]
    assert programs == [ROOT / "benchmarks" / "report.py"]
