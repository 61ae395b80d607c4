"""Builds the tree against a torch of each minor version, and tests it there: python tests/torch_minors.py [MINOR...]

Without a minor it takes all that the library supports; "newest" is the last of them. Each has a copy of the tree with an
environment of its own in build-torch/, on which later runs build. Its newest patch release comes from PyTorch's index of CPU
builds, or, where that has none, under its plain name from where pip looks (on PyPI with CUDA: 6 GB on disk). The program
prints a table of what passed, and ends with 1 where anything failed. Logs lie beside the copies.
"""

from __future__ import annotations

import argparse
import contextlib
import filecmp
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import venv
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch_names

ROOT = Path(__file__).resolve().parents[1]
COPIES = ROOT / "build-torch"
INDEX = os.environ.get("TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
# What touches names of torch's that torch does not promise.
PRIVATE = ("fsdp", "pipeline", "subspace", "package/test_torch_names.py", "package/test_run.py")
EXAMPLES = (
    "examples/test_example.py::test_example_trains_and_reports",
    "examples/test_example_ddp.py::test_example_trains_and_resumes",
    "examples/test_example_diloco.py::test_example_trains",
    "examples/test_example_pipeline.py::test_example_trains",
    "examples/test_example_subspace.py::test_example_trains",
)
# Of these, those that drive torch's FSDP2, its stages and schedules from end to end: minutes, for every change.
ADAPTERS = (
    *(f"fsdp/test_fsdp{name}.py" for name in ("", "1", "_adapter", "_dtypes", "_hsdp", "_mistakes", "_overlap")),
    *(
        f"pipeline/test_pipeline_{name}.py"
        for name in ("differences", "edge", "schedule", "shapes", "stage", "torch_names")
    ),
    *(f"subspace/test_subspace_{name}.py" for name in ("cut", "families", "pipeline")),
    *PRIVATE[-2:],
)
TIERS = {"quick": ("",), "private": PRIVATE, "adapters": ADAPTERS}
# All of a few folders, but of the whole suite what `make test` runs.
MARKS = {"quick": "not slow and not later", "private": "not slow", "adapters": "not slow"}
# pip may have been given constraints that keep torch below a version: here each minor is asked for by its number.
ENVIRONMENT = {"PIP_CONSTRAINT": os.devnull, "LOWCOMM_CUDA": "off", "PYTHONUNBUFFERED": "1"}


class StepFailed(Exception):
    """A step's command failed or ran too long."""


@dataclass
class Result:
    """What came of one minor."""

    minor: str
    torch: str = "not installed"
    steps: dict[str, str] = field(default_factory=dict)  # by step: "passed", or what went wrong

    @property
    def passed(self) -> bool:
        """Whether all steps did."""
        return all(said.startswith("passed") for said in self.steps.values())


class Minor:
    """One minor version's copy of the tree."""

    def __init__(self, minor: str, tier: str, until: float) -> None:
        self._minor, self._tier, self._until = minor, tier, until
        self._folder = COPIES / minor
        self._python = self._folder / ".venv" / "bin" / "python"
        self.result = Result(minor)

    def run(self) -> Result:
        """Copies, installs, builds and tests; a step that fails ends it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (COPIES / f"{self._minor}.log").open("w") as self._log:
            for name, step in (
                ("torch", self._install),
                ("names", self._names),
                ("build", self._build),
                ("tests", self._test),
            ):
                began = time.monotonic()
                try:
                    said = step() or "passed"
                except StepFailed as why:
                    said = str(why)
                self.result.steps[name] = f"{said} ({(time.monotonic() - began) / 60:.1f} min)"
                if not said.startswith("passed"):
                    break
        return self.result

    def _install(self) -> None:
        copy_tree(self._folder)
        if not self._python.exists():
            venv.create(self._folder / ".venv", with_pip=True)
        wanted = f"torch~={self._minor}.0"
        pip = [self._python, "-m", "pip", "install", "--retries", "1"]
        if self._call([*pip, "--index-url", INDEX, wanted], check=False):
            self._call([*pip, wanted])
        show = self._call([self._python, "-c", "import torch; print('torch is', torch.__version__)"], check=False)
        said = Path(self._log.name).read_text()
        if show or not (found := re.findall(r"^torch is (\S+)$", said, re.MULTILINE)):
            raise StepFailed("torch does not import")
        self.result.torch = found[-1]

    def _names(self) -> None:
        site = next((self._folder / ".venv" / "lib").glob("python*/site-packages"))
        if lines := torch_names.missing(site):
            self._log.write("\n".join(lines) + "\n")
            raise StepFailed(f"{len(lines)} missing")

    def _build(self) -> None:
        self._call(["make", "build", f"TORCH=torch=={self.result.torch.partition('+')[0]}", f"PYTHON={sys.executable}"])

    def _test(self) -> str:
        """Quick tests, and one run of each example."""
        said = []
        for which, tests in ((MARKS[self._tier], TIERS[self._tier]), ("slow", EXAMPLES)):
            files = [self._folder / "tests" / "python" / test for test in tests]
            workers = min(os.cpu_count() or 1, 7) + 1
            code = self._call(
                [self._python, "-m", "pytest", "-n", workers, "--dist", "worksteal", "-m", which, *files], check=False
            )
            ends = re.findall(r"^=*\s?(\d+ \w+.*) in [\d.]+s", Path(self._log.name).read_text(), re.MULTILINE)
            said.append(ends[-1] if ends else f"pytest ended with {code}")
            if code:
                raise StepFailed("; ".join(said))
        return f"passed: {'; '.join(said)}"

    def _call(self, command: list[Any], *, check: bool = True) -> int:
        """Runs a command in the copy, within what is left of the time; its exit status."""
        command = [str(word) for word in command]
        self._log.write(f"$ {' '.join(command)}\n")
        self._log.flush()
        return _run(command, self._folder, self._log, self._until, check)


def _run(command: list[str], folder: Path, log: IO[str], until: float, check: bool) -> int:
    # A time-out takes all that the command has started along: they are a session of their own.
    process = subprocess.Popen(
        command, cwd=folder, env=os.environ | ENVIRONMENT, stdout=log, stderr=log, start_new_session=True
    )
    try:
        code = process.wait(max(until - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        raise StepFailed("ran out of time") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if check and code:
        raise StepFailed(f"ended with {code}")
    return code


def copy_tree(folder: Path) -> None:
    """Copies the files that git knows or would add; those of an earlier copy that are gone here go there too."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    files = {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
    record = folder / ".copied"
    for name in set(record.read_text().split("\0") if record.exists() else ()) - files:
        (folder / name).unlink(missing_ok=True)
    for name in sorted(files):
        here, there = ROOT / name, folder / name
        if there.exists() and filecmp.cmp(here, there, shallow=False):
            continue
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(here, there)  # with a time of its own: what was built of an older file is built again
    record.write_text("\0".join(sorted(files)))


def main() -> int:
    """Runs all minors one after another; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("minors", nargs="*", metavar="MINOR", help="for example 2.15; newest; default: all")
    parser.add_argument(
        "--tier",
        choices=TIERS,
        default="quick",
        help="all quick tests, those of private names, or a few of each adapter",
    )
    parser.add_argument("--limit", type=float, default=180.0, help="minutes that a minor may take")
    parser.add_argument(
        "--optional", action="store_true", help="a torch that cannot be installed is said, and no failure"
    )
    given = parser.parse_args()
    versions = runpy.run_path(str(ROOT / "torch_lowcomm" / "_compatibility.py"))
    supported = [f"2.{minor}" for minor in range(versions["OLDEST"][1], versions["NEWEST"][1] + 1)]
    minors = [supported[-1] if minor == "newest" else minor for minor in given.minors] or supported
    if unknown := set(minors) - set(supported):
        parser.error(f"expected minors of {', '.join(supported)}, got {', '.join(sorted(unknown))}")
    results = []
    for minor in minors:
        print(f"torch {minor}: see {COPIES / minor}.log", flush=True)
        results.append(Minor(minor, given.tier, time.monotonic() + 60 * given.limit).run())
        print(f"  {results[-1].torch}: {results[-1].steps}", flush=True)
    print(f"\n{'torch':<16}{'names':<22}{'build':<28}tests ({given.tier})")
    for result in results:
        names, build, tests = (result.steps.get(step, "-") for step in ("names", "build", "tests"))
        said = result.torch if result.torch != "not installed" else f"{result.minor}: {result.steps['torch']}"
        print(f"{said:<16}{names:<22}{build:<28}{tests}")
    return int(not all(result.passed or (given.optional and result.torch == "not installed") for result in results))


if __name__ == "__main__":
    sys.exit(main())
