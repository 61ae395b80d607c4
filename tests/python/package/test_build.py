"""How CMake finds torch, and what it leaves out of a build."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]


def torch_with(cuda, folder):
    """The environment that finds a torch of this version with that CUDA, as far as the build looks, and no nvcc."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").touch()
    version = f"__version__ = {str(torch.__version__)!r}\ncuda = {cuda!r}\n"
    (folder / "torch" / "version.py").write_text(version)
    return {**os.environ, "PYTHONPATH": str(folder), "CUDACXX": "/bin/false"}


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_the_build_knows_whether_torch_has_cuda(tmp_path, cuda):
    command = [sys.executable, ROOT / "cmake" / "find_torch.py"]
    done = subprocess.run(command, env=torch_with(cuda, tmp_path), capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{tmp_path / 'torch'};{torch.__version__.split('+')[0]};{cuda or 'none'}\n", done.stderr


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs CMake")
def test_cuda_kernels_are_left_out_for_a_torch_without_cuda(tmp_path):
    configure = ["cmake", "-S", ROOT, "-B", tmp_path / "build", f"-DPython3_EXECUTABLE={sys.executable}"]

    def configured(cuda, *options):
        env = torch_with(cuda, tmp_path / f"torch{cuda}")
        return subprocess.run([*configure, *options], env=env, capture_output=True, text=True, timeout=120)

    without = configured(None)
    assert without.returncode == 0, without.stderr
    version = torch.__version__.split("+")[0]
    assert f"CUDA kernels: left out (torch {version} has no CUDA; LOWCOMM_CUDA=on compiles them" in without.stdout
    with_cuda = configured("13.0")
    assert "CUDA kernels: left out (no CUDA compiler works here" in with_cuda.stdout, with_cuda.stderr
    insisting = configured("13.1", "-DLOWCOMM_CUDA=on")
    assert insisting.returncode != 0
    assert "LOWCOMM_CUDA=on: expected a CUDA compiler that works here, got none" in insisting.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("has_torch", "given", "installs"),
    [(True, [], 0), (True, ["TORCH=torch==2.12.1"], 1), (False, [], 1)],
)
def test_make_build_leaves_a_torch_alone_that_is_there(tmp_path, has_torch, given, installs):
    """It may be the one for the GPU, in whose place the CPU's would come."""
    bin = tmp_path / "venv" / "bin"
    bin.mkdir(parents=True)
    for name, script in (("python", f"exit {int(not has_torch)}"), ("pip", f'echo "$@" >>{tmp_path}/asked')):
        (bin / name).write_text(f"#!/bin/sh\n{script}\n")
        (bin / name).chmod(0o755)
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "TORCH"}
    ready = tmp_path / "venv" / (".ready-torch2.12.1" if given else ".ready-torch2.13.0")
    subprocess.run(
        ["make", ready, f"VENV={tmp_path / 'venv'}", *given], cwd=ROOT, check=True, capture_output=True, env=env
    )
    asked = [line for line in (tmp_path / "asked").read_text().splitlines() if "torch==" in line]
    assert len(asked) == installs, asked


@pytest.mark.parametrize(("cuda", "tag"), [("", "torch2.13"), ("13.0", "torch2.13.cu130")])
def test_a_wheel_names_the_cuda_of_its_kernels(tmp_path, cuda, tag):
    (tmp_path / "info.py").write_text(f'TORCH_VERSION = "2.13.0"\nCUDA_VERSION = "{cuda}"\n')
    told = subprocess.run(
        [sys.executable, ROOT / "cmake" / "wheel_tag.py", tmp_path / "info.py"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert told.stdout.strip() == tag
