"""A user's first steps, before any tensor moves: import, versions, the command line, the environment."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist

import _torch_lowcomm_autoload
import torch_lowcomm as lc
from torch_lowcomm import _build_info, _compatibility, cli
from torch_lowcomm.cli import info

ROOT = Path(__file__).parents[3]


def run(*command: str, deadline: float = 120, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        capture_output=True, text=True, timeout=deadline, env={**os.environ, **env}, cwd="/",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("found", "built", "says"),
    [
        (None, "2.13.0", "found none"),
        ("2.10.1", "2.13.0", "too old"),
        ("2.14.0+cu130", "2.13.0", "was built for PyTorch 2.13.0 and found 2.14.0+cu130"),
        ("2.13.1", None, "not built"),
        ("2.13.1+cpu", "2.13.0", None),
    ],
)
def test_one_sentence_when_torch_does_not_fit(found, built, says):
    message = _compatibility.problem(found, built)
    if says is None:
        assert message is None
    else:
        assert says in message
        assert "\n" not in message


def test_a_source_folder_that_hides_the_installed_package_is_named(tmp_path):
    source, installed = tmp_path / "source", tmp_path / "installed" / "torch_lowcomm"
    shutil.copytree(ROOT / "torch_lowcomm", source / "torch_lowcomm", ignore=shutil.ignore_patterns("*.so", "_build*"))
    shutil.copy(ROOT / "_torch_lowcomm_autoload.py", source)
    installed.mkdir(parents=True)
    (installed / "_build_info.py").touch()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "import torch_lowcomm"],
        capture_output=True, text=True, timeout=120, cwd=source, env={**os.environ, "PYTHONPATH": str(installed.parent)},
    )  # fmt: skip
    assert done.returncode != 0
    said = done.stderr.splitlines()[-1]
    assert f"not built in its source folder {source / 'torch_lowcomm'}, which hides the installed {installed}" in said


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0a0+git"])
def test_build_names_the_torch_it_cannot_use(tmp_path, version):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '{version}'")
    done = run(str(ROOT / "cmake" / "find_torch.py"), PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert (
        done.stderr == f"torch_lowcomm builds against PyTorch 2.11 to 2.15: found {version} in {tmp_path / 'torch'}.\n"
    )


def test_import_with_another_minor_is_one_sentence():
    other = "2.11.0" if _build_info.TORCH_VERSION.startswith("2.12") else "2.12.0"
    code = f"import torch; torch.__version__ = '{other}'\nimport torch_lowcomm"
    done = run("-c", code)
    assert done.returncode != 0
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .startswith(f"ImportError: torch_lowcomm was built for PyTorch {_build_info.TORCH_VERSION} and found {other}")
    )


def test_torch_is_in_no_requirement():
    tomllib = pytest.importorskip("tomllib", reason="in Python 3.11 and later")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    requirements = project["build-system"]["requires"] + project["project"]["dependencies"]
    assert not [r for r in requirements if r.startswith("torch")]
    assert project["project"]["version"] == lc.__version__


def test_sdist_holds_what_a_build_needs(tmp_path):
    pytest.importorskip("setuptools")
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "build*", "dist", "runs", "*.egg-info"))
    code = "from setuptools.build_meta import build_sdist; build_sdist('dist')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (file,) = (tree / "dist").iterdir()
    with tarfile.open(file) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    for folder in ("csrc", "cmake", "tests/cpp", "tests/golden"):
        expected = {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.*") if path.suffix != ".pyc"}
        assert expected and expected <= names, expected - names
    assert {
        "CMakeLists.txt",
        "setup.py",
        "pyproject.toml",
        "torch_lowcomm/_C.pyi",
        "_torch_lowcomm_autoload.py",
    } <= names
    made_here = {name for name in names if name.endswith((".so", ".pyc", "_build_info.py"))}
    assert not made_here


def test_a_failing_registration_is_a_warning_and_the_package_says_it_as_an_error(monkeypatch):
    def refuse(*args, **kwargs):
        raise TypeError("register_backend() takes\nother arguments")

    monkeypatch.setattr(dist.Backend, "register_backend", refuse)
    monkeypatch.setattr(dist.Backend, "backend_list", [])
    with pytest.warns(RuntimeWarning) as said:
        _torch_lowcomm_autoload.register()
    assert [str(one.message) for one in said] == [
        "torch_lowcomm could not register its backend with this torch: TypeError: register_backend() takes other arguments"
    ]
    with pytest.raises(TypeError):
        _torch_lowcomm_autoload.register_backend()


def test_a_wrong_as_gloo_is_a_warning(monkeypatch):
    monkeypatch.setenv("LOWCOMM_AS_GLOO", "yes")
    with pytest.warns(RuntimeWarning) as said:
        _torch_lowcomm_autoload.register()
    assert [str(one.message) for one in said] == [
        "torch_lowcomm leaves gloo in its place: expected LOWCOMM_AS_GLOO to be 1, 0 or unset, got 'yes'"
    ]


@pytest.mark.later
def test_info_tests_the_build_whatever_the_environment_says():
    settings = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "LOWCOMM_MIN_BYTES": "1000000", "LOWCOMM_AS_GLOO": "1"}
    done = run("-m", "torch_lowcomm", "info", LOWCOMM_KERNELS="scalar", **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    for row in (
        "torch_lowcomm",
        "wire format",
        "torch ",
        "build",
        "kernels         scalar",
        "codecs",
        "NCCL",
    ):
        assert f"\n{row}" in "\n" + done.stdout
    assert "two ranks, exact and 8 bits: passed" in done.stdout


@pytest.mark.later
def test_kernels_of_a_wrong_name_are_refused():
    done = run("-m", "torch_lowcomm", "info", "--no-self-test", LOWCOMM_KERNELS="mmx")
    assert done.returncode == 2
    (said,) = done.stderr.splitlines()
    assert "LOWCOMM_KERNELS" in said and "mmx" in said


@pytest.mark.parametrize(
    ("built", "staged", "says"),
    [
        ("", "", "copied and coded by the host (LOWCOMM_ENCODE_ON_DEVICE is not 1)"),
        ("90", "0", "copied and coded by the host (LOWCOMM_ENCODE_ON_DEVICE is not 1)"),
        ("", "1", "copied and coded by the host (LOWCOMM_ENCODE_ON_DEVICE=1 asks for kernels, which this build has not)"),
        ("90", "1", "coded on their GPU if it has kernels (LOWCOMM_ENCODE_ON_DEVICE=1), else copied and coded by the host"),
    ],
)  # fmt: skip
def test_info_says_where_cuda_tensors_are_coded(monkeypatch, capsys, built, staged, says):
    """Kernels in the build are not used unless somebody asks for it."""
    monkeypatch.setattr(_build_info, "CUDA_ARCHITECTURES", built)
    monkeypatch.setenv("LOWCOMM_ENCODE_ON_DEVICE", staged)
    assert cli.main(["info", "--no-self-test"]) == 0
    assert f"CUDA tensors    {says}\n" in capsys.readouterr().out


def _has_driver(monkeypatch, number):
    """A driver for CUDA `number`, as cuDriverGetVersion has it, or none."""

    class Driver:
        def cuDriverGetVersion(self, at):
            at._obj.value = number
            return 0

    load_other = info.ctypes.CDLL

    def load(name):
        if name != "libcuda.so.1":  # torch's own questions
            return load_other(name)
        if number is None:
            raise OSError(name)
        return Driver()

    monkeypatch.setattr(info.ctypes, "CDLL", load)


@pytest.mark.parametrize(
    ("built", "driver", "says"),
    [
        ("", None, "not in this build"),
        ("80-real;90-real;90-virtual", None, "compiled for sm_80, sm_90, PTX of sm_90 by CUDA 13.0"),
        ("89", None, "compiled for sm_89, PTX of sm_89 by CUDA 13.0"),
        ("native", None, "compiled for native by CUDA 13.0"),
        ("90-real", 12040, "compiled for sm_90 by CUDA 13.0, which this driver (12.4) cannot run"),
    ],
)
def test_info_names_what_cuda_kernels_were_compiled_for(monkeypatch, capsys, built, driver, says):
    monkeypatch.setattr(_build_info, "CUDA_ARCHITECTURES", built)
    monkeypatch.setattr(_build_info, "CUDA_VERSION", "13.0")
    if driver:
        monkeypatch.setattr(torch.version, "cuda", "12.4")
        _has_driver(monkeypatch, driver)
    assert cli.main(["info", "--no-self-test"]) == 0
    assert f"CUDA kernels    {says}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cuda", "gpus", "nccl", "says"),
    [
        (None, [], False, ["this torch is built without CUDA", "not in this torch"]),
        ("13.0", [], True, ["13.0 in this torch, none in the driver, no GPU found", "finds no GPU"]),
        (
            *("13.0", ["A", "B"], True),
            ["13.0 in this torch, 12.4 in the driver, A, B", "carries exact ops of CUDA tensors where asked for"],
        ),
    ],
)
def test_info_says_what_torch_has_of_cuda(monkeypatch, capsys, cuda, gpus, nccl, says):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_name", gpus.__getitem__)
    _has_driver(monkeypatch, 12040 if gpus else None)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    assert cli.main(["info", "--no-self-test"]) == 0
    out = capsys.readouterr().out
    for row, value in zip(("CUDA            ", "NCCL            "), says, strict=True):
        assert f"\n{row}{value}" in out


def test_nothing_that_a_peer_sends_is_unpickled():
    """No object collective, which unpickles; what torch.load reads, it reads as tensors and numbers."""
    for path in (ROOT / "torch_lowcomm").rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"\w+_object(_list)?\(|\bimport pickle|\bpickle\.", text), path
        assert all("weights_only=True" in line for line in text.splitlines() if "torch.load(" in line), path


def test_a_folder_of_its_name_does_not_hide_it(tmp_path):
    """A script next to a checkout: the folder, which has no `__init__.py`, is no package that comes before the installed one."""
    (tmp_path / "torch_lowcomm").mkdir()
    script = tmp_path / "mine.py"
    script.write_text("import torch_lowcomm as lc\nprint(lc.codec('none').spec)\n")
    ended = ranks.run_command([sys.executable, script], deadline_s=120, cwd=tmp_path)
    assert (ended.code, ended.out) == (0, "none\n"), ended.err
