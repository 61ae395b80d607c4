"""The package for C++ programs: installed from the build, found by CMake, and programs that run."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import ranks
import torch

ROOT = Path(__file__).resolve().parents[3]
BUILD = ROOT / "build"


def run(*command, deadline_s=600, cwd=ROOT):
    status, out, err = ranks.run_command(list(map(str, command)), deadline_s=deadline_s, cwd=cwd)
    assert status == 0, f"{command}\n{out}\n{err}"
    return out


@pytest.mark.slow
@pytest.mark.skipif(not (BUILD / "cmake_install.cmake").exists(), reason="no build tree: `make build` makes it")
@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
def test_programs_link_the_outer_loop_and_channels(tmp_path):
    """Built in a folder of their own from examples/cpp: the replicas end with the same loss, well under where they began, as
    threads and as processes over TCP without Python, and what a stage receives at 2 bits is near what was sent.
    """
    prefix = tmp_path / "prefix"
    run("cmake", "--install", BUILD, "--prefix", prefix)
    paths = f"{prefix};{torch.utils.cmake_prefix_path}"
    run("cmake", "-S", ROOT / "examples" / "cpp", "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={paths}")
    run("cmake", "--build", tmp_path / "build")
    out = run(tmp_path / "build" / "diloco", deadline_s=120)
    losses = re.findall(r"rank \d: loss (\S+), sent (\d+) bytes", out)
    assert len(losses) == 3, out
    assert len({loss for loss, _ in losses}) == 1
    assert float(losses[0][0]) < 1.0  # 3.6 at the start
    raw = 30 * 4 * (16 * 64 + 64 + 64 * 4 + 4)  # what a rank's pseudo-gradients are in float32
    assert all(0 < int(sent) < raw / 2 for _, sent in losses)
    folder = tmp_path / "rendezvous"
    processes = [
        subprocess.Popen([tmp_path / "build" / "diloco", str(rank), "2", folder], stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    try:
        outs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    losses = [re.fullmatch(r"rank \d: loss (\S+), sent (\d+) bytes\n", out) for out in outs]
    assert all(losses), outs
    assert losses[0][1] == losses[1][1]
    assert float(losses[0][1]) < 1.0
    assert all(0 < int(loss[2]) < raw / 2 for loss in losses)
    errors = re.findall(r"visit \d: relative error (\S+)", run(tmp_path / "build" / "pipeline", deadline_s=120))
    assert len(errors) == 4
    assert all(float(error) < 0.03 for error in errors), errors


def test_headers_are_those_of_the_layers():
    """Installed headers include installed headers only."""
    layers = ("base", "kernels", "codec", "wire", "transport", "collective", "messages", "engine", "pipeline")
    layers += ("tensor", "diloco", "adam", "seed_replay")
    headers = [header for layer in layers for header in (ROOT / "csrc" / layer).rglob("*.h")]
    assert headers
    for header in headers:
        for included in re.findall(r'#include "([^"]+)"', header.read_text()):
            assert included.split("/")[0] in layers, f"{header.name} includes {included}"
            assert (ROOT / "csrc" / included).suffix == ".inl" or (ROOT / "csrc" / included) in headers, included
