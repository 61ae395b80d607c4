"""The steps of the check, each a function of `Place` that returns its facts or raises `StepFailed`.

No step makes a virtual environment or asks a network: Python, its torch and the compilers are those that are there.
"""

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ranks

from gpu_check import carry, check, reports

ROOT = Path(__file__).resolve().parents[3]
BUILD = ROOT / "build"
CARRIED, UNPACKED = ROOT / "gpu-carry", ROOT / "build-carried"  # what `make gpu-carry` packed, and its programs
SHARDS = 4  # of cuda_tests, at the same time: most of a test's seconds are the host's

# Faults that only compute-sanitizer sees, the simulator being one thread: on tests that between them run every kind of kernel.
SANITIZED = "*EveryWidthAndSize*:*SumsEqual*:*DeltaAndFeedback*:*LargeBuckets:*EveryFormAndSize*:*LongTensors*"
SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")


class StepFailed(Exception):
    """A step has no success to tell; the message says what it expected and found, `facts` what it knows all the same."""

    def __init__(self, why, facts=None):
        super().__init__(why)
        self.facts = facts


@dataclasses.dataclass
class Place:
    """Where a step finds its things: folder for logs, stages to perform, their device, GoogleTest's sources."""

    out: Path
    device: str = "cuda"
    stages: tuple = ()
    gtest: str = ""


def run(place, log, command, *, deadline_s, env=None, expect=(0,)):
    """Runs a command in the tree; its output goes to `out`/`log`.log, the end of it into the error."""
    doing = " ".join(Path(str(part)).name for part in command[:2])
    try:
        ended = ranks.run_command(command, deadline_s=deadline_s, env=env, cwd=ROOT, patience_s=5)
        text = ended.text
    except FileNotFoundError:
        raise StepFailed(f"{doing}: expected the program {command[0]}, found none") from None
    except ranks.RanksFailed as late:
        ended, text = None, str(late)
    with (place.out / f"{log}.log").open("a") as file:
        file.write(f"$ {' '.join(map(str, command))}\n{text}\n")
    if ended is None:
        raise StepFailed(f"{doing}: no end within {deadline_s:.0f} s: {text[-1500:]}")
    if ended.code not in expect:
        raise StepFailed(f"{doing}: expected exit status {expect[0]}, got {ended.code}: {text[-1500:]}")
    return text


def _jobs():
    return os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)


def _made(place, log, target, deadline_s):
    """A program: the one that was carried here, or built.

    The folder is configured anew for the C++ tests, but nothing is that nobody named.
    """
    if (UNPACKED / target).exists():
        return UNPACKED / target
    configure = ["cmake", "-S", ROOT, "-B", BUILD, "-DLOWCOMM_BUILD_TESTS=ON", "-DLOWCOMM_CUDA=on"]
    configure += [f"-DPython3_EXECUTABLE={sys.executable}", f"-DLOWCOMM_GTEST={place.gtest}"]
    run(place, log, configure, deadline_s=60)
    run(place, log, ["cmake", "--build", BUILD, "--target", target, "--parallel", _jobs()], deadline_s=deadline_s)
    return BUILD / target


def architecture(place, log):
    """CUDAARCHS for the GPU that is here, unless it is set: every further architecture costs as many minutes again."""
    if os.environ.get("CUDAARCHS"):
        return os.environ["CUDAARCHS"]
    said = run(place, log, ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"], deadline_s=30)
    return said.split()[0].replace(".", "") + "-real"


def build(place):
    """The extension, into this tree and not into the machine's Python; where one was carried here and imports, that one."""
    shutil.rmtree(UNPACKED, ignore_errors=True)
    if CARRIED.exists():
        carry.unpack(CARRIED, ROOT / "torch_lowcomm", UNPACKED)
        try:
            run(place, "build", [sys.executable, "-c", "import torch_lowcomm"], deadline_s=60)
            return {"carried": True}
        except StepFailed as why:
            shutil.rmtree(UNPACKED)
            print(f"  what was carried does not import, and is built: {why}", flush=True)
    archs = architecture(place, "build")
    env = {"CUDAARCHS": archs, "LOWCOMM_CUDA": "on", "MAX_JOBS": _jobs()}
    run(place, "build", [sys.executable, "setup.py", "-q", "build_ext", "--inplace"], deadline_s=540, env=env)
    return {"cuda_architectures": archs}


def unit(place):
    """The kernels' own tests on the device. Directly, and not by ctest: that would make a context a test."""
    program = _made(place, "unit", "cuda_tests", deadline_s=420)
    with tempfile.TemporaryDirectory() as folder:
        reported = [Path(folder) / f"shard{i}.json" for i in range(SHARDS)]
        with (place.out / "unit.log").open("a") as log:
            shards = [_shard(program, i, path, log) for i, path in enumerate(reported)]
            end = time.monotonic() + 240
            try:
                codes = [shard.wait(max(0, end - time.monotonic())) for shard in shards]
            except subprocess.TimeoutExpired:
                raise StepFailed("cuda_tests: no end within 240 s") from None
            finally:
                for shard in shards:
                    shard.kill()
                    shard.wait()
        facts, wrong = reports.unit_tests(reported)
    if wrong or any(codes):
        raise StepFailed(f"cuda_tests: expected exit status 0, got {codes}: " + "\n".join(wrong[:20]), facts)
    return facts


def _shard(program, number, report, log):
    env = dict(os.environ, GTEST_TOTAL_SHARDS=str(SHARDS), GTEST_SHARD_INDEX=str(number))
    command = [program, "--gtest_brief=1", f"--gtest_output=json:{report}"]
    return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def sanitizer(place):
    """compute-sanitizer's four tools on some of the same tests; all four are asked whatever the first ones say."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    tests = [_made(place, "sanitizer", "cuda_tests", deadline_s=420), "--gtest_brief=1", f"--gtest_filter={SANITIZED}"]
    facts, wrong = {}, []
    for tool in SANITIZERS:
        start = time.monotonic()
        try:
            run(place, "sanitizer", [program, "--tool", tool, "--error-exitcode", "9", *tests], deadline_s=100)
        except StepFailed as why:
            wrong.append(f"{tool}: {why}")
        facts[tool] = {"ok": not (wrong and wrong[-1].startswith(tool)), "seconds": round(time.monotonic() - start, 1)}
    if wrong:
        raise StepFailed("\n".join(wrong), facts)
    return facts


def python(place):
    """The stages; on a GPU also the tests that need one, except for those that are the stages themselves."""
    results = check.perform_all(place.stages, place.device, deadline_s=420)
    wrong = [f"{name}: {result['why'][-3000:]}" for name, result in results.items() if not result["ok"]]
    if place.device == "cuda":
        tests = [sys.executable, "-m", "pytest", "-m", "cuda", "--ignore", "tests/python/cuda/test_gpu_check.py"]
        try:
            run(place, "pytest", tests, deadline_s=240, env=check.ON_ONE_GPU)
        except StepFailed as why:
            wrong.append(str(why))
    if wrong:
        raise StepFailed("\n".join(wrong), {"stages": results})
    return {"stages": results}


def perf(place):
    """Speed of the kernels: a row below its bound is a fact, other values than the host's are a failure."""
    program = _made(place, "perf", "cuda_perf", deadline_s=240)
    rows = place.out / "cuda_perf.json"
    run(place, "perf", [program, "--json", rows], deadline_s=240, expect=(0, 1))
    if not rows.exists():
        raise StepFailed(f"cuda_perf: expected {rows}, got no such file: it measured nothing")
    facts, wrong = reports.kernel_speed(rows)
    if wrong:
        raise StepFailed("\n".join(wrong), facts)
    return facts


def train(place):
    """Loss curves of some minutes each (gpu_check/training.py). By name alone: it takes what device time is left."""
    from gpu_check import training  # imports the extension

    seconds = float(os.environ.get("SECONDS_A_RUN", "180"))
    facts = {}
    for run_name in training.RUNS:
        try:
            facts[run_name] = check.train(run_name, place.device, seconds)
        except ranks.RanksFailed as why:
            raise StepFailed(f"{run_name}: {str(why)[-3000:]}", facts) from None
        first, last = (facts[run_name]["curve"][place_of][2] for place_of in (0, -1))
        if not last < first:
            raise StepFailed(f"{run_name}: expected a loss that falls, got {first} and then {last}", facts)
    return facts


STEPS = {step.__name__: step for step in (build, unit, sanitizer, python, perf, train)}
