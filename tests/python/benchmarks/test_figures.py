"""Measured figures on the pages: they are those of the results, and results say what was measured."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import figures  # noqa: E402
import pages  # noqa: E402
import report  # noqa: E402
import result_pages  # noqa: E402

README = (ROOT / "README.md").read_text()
PAGES = {path.stem: path.read_text() for path in figures.RESULTS.glob("*.md")}


def test_the_readmes_figures_are_the_results():
    assert not list(figures.wrong_in_readme(README))
    assert not figures.unmeasured(README)


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_pages_figures_are_the_results(name):
    assert not list(figures.wrong_in_page(name, PAGES[name]))


def test_every_result_is_on_a_page():
    shown = {name for page in PAGES.values() for name, _ in result_pages.blocks(page)}
    shown |= {name for page in PAGES.values() for name in re.findall(r"(\w+)\.json", page)}
    assert {path.stem for path in figures.RESULTS.glob("*.json")} <= shown


def test_the_gates_of_diloco_bits_follow_from_its_runs():
    content = figures.load("diloco_bits")
    gates = importlib.import_module("convergence.diloco.runs").bits_gates(content["curves"])
    assert [gate.to_json() for gate in gates] == content["gates"]


@pytest.mark.parametrize("begin", sorted(figures.table()))
def test_a_wrong_figure_of_the_readme_is_named(begin):
    (row,) = [line for line in README.splitlines() if line.startswith(begin)]
    for place, digit in [(i, c) for i, c in enumerate(row) if c.isdigit() and i > len(begin)]:
        other = row[:place] + str((int(digit) + 1) % 10) + row[place + 1 :]
        (said,) = figures.wrong_in_readme(README.replace(row, other))
        assert begin in said


def test_what_nothing_compares_is_named():
    row = "| another codec | 5.021 | 8 |"
    assert figures.unmeasured(f"{README}\n{row}\n") == [row]
    (value,) = [gate["value"] for gate in figures.load("fsdp")["gates"] if gate["name"].startswith("perplexity ratio")]
    gate = re.search(r"^PASS  perplexity ratio W8G8 .*$", PAGES["fsdp"], re.MULTILINE)[0]
    other = gate.replace(f" {value:.4f} ", f" {value + 0.0002:.4f} ")
    (said,) = figures.wrong_in_page("fsdp", PAGES["fsdp"].replace(gate, other))
    assert "fsdp.json has other gates" in said


def test_a_wrong_row_is_named():
    row = next(line for line in PAGES["linklab"].splitlines() if "gloo" in line and line.startswith("  "))
    figure = re.search(r" (\d+\.\d\d) ", row)[1]
    (said,) = figures.wrong_in_page("linklab", PAGES["linklab"].replace(row, row.replace(figure, "77777.77", 1)))
    assert "linklab.json" in said and "77777.77" in said


def test_a_program_writes_what_it_printed_into_its_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n<!-- output of one -->\n```\nold\nrows\n```\n\nread\n<!-- output of two -->\n```\n```\n")
    assert result_pages.update("one", "# one\n  1.5\n", tmp_path) == page
    assert result_pages.update("two", "# two\n", tmp_path) == page
    assert result_pages.update("three", "# three\n", tmp_path) is None
    assert result_pages.blocks(page.read_text()) == [("one", "# one\n  1.5\n"), ("two", "# two\n")]
    assert "\n\nread\n" in page.read_text()
    page.write_text("# Page\n\n<!-- no output of first yet -->\n\nread\n")
    assert result_pages.blocks(page.read_text()) == [] and result_pages.update("first", "# one\n", tmp_path) == page
    assert page.read_text() == "# Page\n\n<!-- output of first -->\n```\n# one\n```\n\nread\n"


@pytest.mark.parametrize("page", pages.of_tables(), ids=lambda page: page.stem)
def test_a_results_page_has_the_results_figures(page):
    assert not list(pages.wrong_in_page(page))


def test_a_wrong_row_of_a_results_page_is_named(tmp_path):
    table = {"title": "a table", "columns": ["bits", "ratio"], "rows": [["W4", "1.0172"]]}
    gates = [{"name": "a ratio", "value": 1.0172, "op": "<", "bound": 1.03}]
    (tmp_path / "printed.json").write_text(json.dumps({"tables": [table], "gates": gates}))
    (tmp_path / "old.json").write_text(json.dumps({"rows": [{"seconds": 2.5}], "gates": []}))
    page = tmp_path / "page.md"
    right = "Of printed.json:\n| bits | ratio |\n| --- | --- |\n| W4 | 1.0172 |\n" + report.Gate(**gates[0]).line()
    assert not list(pages.wrong_in_page(page, right))
    assert not list(pages.wrong_in_page(page, right + "\nold.json:\n| a step | 2.50 s |\n"))
    for was, becomes in (("| 1.0172 |", "| 1.0127 |"), ("1.0172 |", "1.017 |"), (" 1.0172  <", " 1.0127  <")):
        assert was in right
        (said,) = pages.wrong_in_page(page, right.replace(was, becomes))
        assert "of printed" in said
    (said,) = pages.wrong_in_page(page, right + "\nold.json:\n| a step | 2.40 s |\n")
    assert "2.40" in said
    assert list(pages.wrong_in_page(page, "| W4 | 1.0172 |"))


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


def test_a_stamp_keeps_an_earlier_one(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('{"rows": [\n  {"codec": "sym4"},\n  {"codec": "sym8"}\n]}\n')
    report.stamp(path)
    stamped = json.loads(path.read_text())
    assert stamped["rows"] == [{"codec": "sym4"}, {"codec": "sym8"}]
    path.write_text(path.read_text().replace(stamped["versions"]["commit"], "0123456789ab"))
    report.stamp(path)
    assert json.loads(path.read_text())["versions"] == {**stamped["versions"], "commit": "0123456789ab"}


def test_a_row_and_a_curve_are_a_line():
    curve = {"name": "exact", "seed": 0, "loss": [1.25] * 1000}
    content = {"rows": [{"op": "x" * 700}, {"op": "y" * 900}], "curves": [curve], "empty": [], "none": {}}
    text = report.laid_out(content)
    assert json.loads(text) == content
    lines = [line.strip() for line in text.splitlines()]
    assert lines[2].startswith('{"op": "xx') and lines[3].startswith('{"op": "yy')
    assert f'"loss": {json.dumps(curve["loss"])}' in lines and '"empty": [],' in lines and '"none": {}' in lines


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_stamps_what_programs_in_cpp_write():
    commands = subprocess.run(
        ["make", "-n", "bench-codec", "bench-cuda"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    written = re.findall(r"build-codec/\w+ --json (\S+\.json)", commands)
    assert [Path(path).name for path in written] == ["codec_perf.json", "cuda_perf.json"]
    assert re.findall(r"benchmarks/report\.py (\S+\.json)", commands) == written
