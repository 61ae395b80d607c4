"""How much of the code each tier of tests runs: python tests/coverage_tiers.py [--quick], or `make coverage`.

Builds a copy of the tree in build-coverage/, whose C++ counts the lines that run, and runs in it what `make test` runs, and then
the rest of `make test-all`. Prints the lines and branches of csrc and torch_lowcomm that ran, by tier, and ends with 1 where the
quick tier runs fewer than 85 % of the lines that all tests run. An hour and a half on two cores. A process that is killed
leaves no counts, so tests of faults run more than is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch_minors

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build-coverage"
TREE, DATA = FOLDER / "tree", FOLDER / "data"
PYTHON = TREE / ".venv" / "bin" / "python"
LEAST = 0.85
MARKS = {"quick": torch_minors.MARKS["quick"], "rest": "slow or later"}
COUNTS = {"CXXFLAGS": "--coverage -fprofile-update=atomic", "LDFLAGS": "--coverage", "LOWCOMM_CUDA": "off"}
CONFIGURATION = f"""
[run]
branch = true
parallel = true
sigterm = true
source = {TREE / "torch_lowcomm"}
data_file = {DATA / "python"}
patch = subprocess, fork, _exit
"""


def run(*command: object, check: bool = True) -> int:
    """Runs a command in the copy."""
    print("$", *command, flush=True)
    return subprocess.run([str(word) for word in command], cwd=TREE, env=os.environ | COUNTS, check=check).returncode


def build() -> None:
    """Copies the tree and builds the extension and the tests of the quick tier."""
    DATA.mkdir(parents=True, exist_ok=True)
    TREE.mkdir(exist_ok=True)
    torch_minors.copy_tree(TREE)
    if not (TREE / ".venv").exists():
        (TREE / ".venv").symlink_to(ROOT / ".venv")
    (FOLDER / "coveragerc").write_text(CONFIGURATION)
    run(PYTHON, "setup.py", "-q", "build_ext", "--build-lib", ".")  # with what it was built for beside it
    run("cmake", "-S", ".", "-B", "build", "-DLOWCOMM_BUILD_TESTS=ON", f"-DPython3_EXECUTABLE={PYTHON}")
    run("cmake", "--build", "build", "--target", "core_tests", "torch_tests")
    for counts in (*TREE.glob("build/**/*.gcda"), *DATA.iterdir()):
        counts.unlink()


def play(tier: str) -> None:
    """Runs a tier; its failures are printed, and are for `make test` to mend."""
    rest = re.findall(r"^REST := '(.*)'$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0]
    which = ["--exclude-regex", f"{rest}|_NOT_BUILT"] if tier == "quick" else ["--tests-regex", rest]
    if tier == "rest":
        run("cmake", "--build", "build")
    run("ctest", "--test-dir", "build", "--parallel", 3, *which, check=False)
    coverage = [PYTHON, "-m", "coverage", "run", f"--rcfile={FOLDER / 'coveragerc'}", "-m"]
    run(*coverage, "pytest", "-n", 3, "--dist", "worksteal", "-m", MARKS[tier], check=False)


def by_source(files: list[dict[str, Any]]) -> dict[str, int]:
    """Counts each line of a source file once: gcovr has those of kernels and templates once for each form made of them."""
    lines: dict[tuple[str, int], bool] = {}
    branches: dict[tuple[str, int, int], bool] = {}
    for file in files:
        for line in file["lines"]:
            where = (file["file"], line["line_number"])
            lines[where] = lines.get(where, False) or line["count"] > 0
            for number, branch in enumerate(line.get("branches", ())):
                way = (*where, number)
                branches[way] = branches.get(way, False) or branch["count"] > 0
    return {
        "line_covered": sum(lines.values()),
        "line_total": len(lines),
        "branch_covered": sum(branches.values()),
        "branch_total": len(branches),
    }


def counted() -> dict[str, dict[str, int]]:
    """What has run since build(): by language, its lines and branches, and how many there are."""
    said = FOLDER / "counted.json"
    gcovr = ["-m", "gcovr", "--root", TREE, "--filter", "csrc/", "--exclude-throw-branches", "--json", said]
    run(PYTHON, *gcovr, "--gcov-ignore-parse-errors=all", "--merge-mode-functions=separate", "-j", 2, "build")
    cpp = by_source(json.loads(said.read_text())["files"])
    configured = f"--rcfile={FOLDER / 'coveragerc'}"
    run(PYTHON, "-m", "coverage", "combine", "-q", "--append", configured)
    run(PYTHON, "-m", "coverage", "json", "-q", configured, "-o", said)
    python = json.loads(said.read_text())["totals"]
    return {
        "csrc": cpp,
        "torch_lowcomm": {
            "line_covered": python["covered_lines"],
            "line_total": python["num_statements"],
            "branch_covered": python["covered_branches"],
            "branch_total": python["num_branches"],
        },
    }


def main() -> int:
    """Builds, runs and reports; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only the quick tier: nothing is compared")
    only_quick = parser.parse_args().quick
    build()
    found = {}
    for tier, name in (("quick", "make test"), *(() if only_quick else (("rest", "make test-all"),))):
        play(tier)
        found[name] = counted()
    (FOLDER / "coverage.json").write_text(json.dumps(found, indent=1))
    print(f"{'tests':<15}{'code':<15}{'lines':>16}{'branches':>20}")
    for name, by_language in found.items():
        for language, of in by_language.items():
            lines = f"{of['line_covered']} of {of['line_total']}"
            branches = f"{of['branch_covered']} of {of['branch_total']}"
            print(f"{name:<15}{language:<15}{lines:>16}{branches:>20}")
    if only_quick:
        return 0
    quick, whole = (sum(of["line_covered"] for of in found[name].values()) for name in ("make test", "make test-all"))
    print(
        f"make test runs {100 * quick / whole:.1f} % of the lines that make test-all runs (at least {100 * LEAST:.0f})"
    )
    return int(quick < LEAST * whole)


if __name__ == "__main__":
    sys.exit(main())
