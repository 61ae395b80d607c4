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
