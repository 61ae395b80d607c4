"""The command: performs steps one after another and writes what they found into one JSON, after each of them."""

import argparse
import json
import platform
import subprocess
import time
from pathlib import Path

from gpu_check.stages import STAGES
from gpu_check.steps import STEPS, Place, StepFailed

DRY = ("python", "train")  # what there is to do without a GPU
BY_NAME = ("train",)  # steps that are done only where they are asked for


def main(arguments):
    """0 where every step succeeded, 1 where one failed."""
    args = _parse(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    place = Place(args.out, args.device, args.only, args.gtest)
    path = args.out / "gpu_check.json"
    # A run may be in parts: build and unit tests in one call, the rest in another.
    report = json.loads(path.read_text()) if path.exists() else {}
    report["machine"] = _machine(args.device)
    report.setdefault("steps", {})
    for name in args.steps:
        report["steps"][name] = _perform(name, place)
        report["ok"] = all(step["ok"] for step in report["steps"].values())
        path.write_text(json.dumps(report, indent=1))
    failed = [name for name in args.steps if not report["steps"][name]["ok"]]
    print(f"{path}: " + (f"failed: {', '.join(failed)}" if failed else f"{', '.join(args.steps)}: all as expected"))
    return 1 if failed else 0


def _perform(name, place):
    print(f"{name} ...", flush=True)
    start = time.monotonic()
    try:
        result = {"ok": True, "facts": STEPS[name](place)}
    except StepFailed as why:
        result = {"ok": False, "why": str(why), "facts": why.facts}
        print(f"  {why}", flush=True)
    result["seconds"] = round(time.monotonic() - start, 1)
    print(f"{'pass' if result['ok'] else 'FAIL'}  {name} {result['seconds']:.1f} s", flush=True)
    return result


def _machine(device):
    """The machine that the figures and failures are of."""
    facts = {"device": device, "processor": platform.machine(), "python": platform.python_version()}
    commands = {
        "gpu": ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
        "nvcc": ["nvcc", "--version"],
    }
    for key, command in commands.items() if device == "cuda" else ():
        try:
            said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
            facts[key] = said.strip().splitlines()[-1] if said.strip() else "nothing was said"
        except (FileNotFoundError, subprocess.TimeoutExpired) as why:
            facts[key] = str(why)
    return facts


def _parse(arguments):
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the stages without a GPU")
    parser.add_argument(
        "--steps",
        default="",
        help=f"of {' '.join(STEPS)}; default: all but train; on the CPU python and train are possible",
    )
    parser.add_argument("--only", default="", help=f"stages of the step python: of {' '.join(STAGES)}; default: all")
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_check.json and logs")
    parser.add_argument("--gtest", default="", help="GoogleTest's sources, where it is not installed")
    args = parser.parse_args(arguments)
    possible = DRY if args.device == "cpu" else tuple(STEPS)
    usual = tuple(step for step in possible if step not in BY_NAME)
    args.steps, args.only = tuple(args.steps.split()) or usual, tuple(args.only.split()) or STAGES
    for given, there, what in ((args.steps, possible, "--steps"), (args.only, STAGES, "--only")):
        if unknown := [name for name in given if name not in there]:
            parser.error(f"{what}: expected some of {' '.join(there)} with device {args.device}, got {unknown[0]}")
    args.out = args.out.resolve()
    return args
