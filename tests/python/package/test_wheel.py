"""`make wheel`: what a machine without a compiler installs next to its torch, and trains with."""

import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
import ranks
import torch

import torch_lowcomm as lc

ROOT = Path(__file__).resolve().parents[3]
CACHE = ROOT / "build" / "CMakeCache.txt"
BIN = Path(sys.executable).parent

# Forked, so that torch is imported once; the loss of the last of 20 steps next to the first, and what was sent coded.
TRAIN = """
import multiprocessing, sys
import torch, torch.distributed as dist, torch_lowcomm as lc

def train(rank):
    dist.init_process_group("lowcomm", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=2)
    lc.set_policy("all_reduce=qsgd8")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    features = torch.randn(64, 256, generator=torch.Generator().manual_seed(rank))
    losses = []
    for _ in range(20):
        loss = (model(features) - features).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0], losses
    (stats,) = lc.stats().values()
    assert stats["all_reduce"]["calls"] >= 20, stats
    dist.destroy_process_group()

ranks = [multiprocessing.get_context("fork").Process(target=train, args=(rank,)) for rank in range(2)]
for rank in ranks: rank.start()
for rank in ranks: rank.join(60)
assert [rank.exitcode for rank in ranks] == [0, 0]
print("trained with", lc.__file__)
"""


def run(*command, cwd=ROOT, **env):
    code, out, err = ranks.run_command(command, deadline_s=240, cwd=cwd, env=env)
    assert code == 0, f"{command}\n{out}\n{err}"
    return out


def as_built():
    """The environment in which a build finds everything done."""
    cache = dict(re.findall(r"^(\w+):\w+=(.*)$", CACHE.read_text(), re.MULTILINE))
    return {"LOWCOMM_CUDA": cache["LOWCOMM_CUDA"], "DEBUG": str(int(cache["CMAKE_BUILD_TYPE"] == "Debug"))}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("auditwheel", reason="`make build` installs it")
    if not CACHE.exists() or shutil.which("make") is None or sys.prefix == sys.base_prefix:
        pytest.skip("needs the build tree and the environment of `make build`")
    built = BIN.parent / ".built"
    dist = tmp_path_factory.mktemp("dist")
    run("make", "-o", built, "wheel", f"VENV={BIN.parent}", f"DIST={dist}", **as_built())
    (made,) = dist.glob("*.whl")
    return made


@pytest.mark.slow
def test_the_wheel_names_its_torch_and_platform_and_holds_nothing_of_torch(wheel):
    minor = ".".join(torch.__version__.split(".")[:2])
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    named = rf"torch_lowcomm-{re.escape(lc.__version__)}\+torch{re.escape(minor)}-{python}-{python}-manylinux_2_\d+_\w+\.whl"
    assert re.fullmatch(named, wheel.name), wheel.name
    archive = zipfile.ZipFile(wheel)
    (extension,) = [name for name in archive.namelist() if ".so" in name]
    assert extension.startswith("torch_lowcomm/_C.")
    rpath = f"{Path(torch.__file__).parent}/lib".encode()
    assert archive.read(extension).count(rpath) == 0, "torch is imported first, and lies elsewhere on other machines"
    assert {"torch_lowcomm/_build_info.py", "torch_lowcomm/py.typed"} <= set(archive.namelist())


@pytest.mark.slow
def test_the_wheel_trains_where_there_is_no_compiler(wheel, tmp_path):
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "fresh")
    python = tmp_path / "fresh" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel)
    # torch is not installed once more but found where it is; the checkout's own package there is an editable one, which a
    # folder that is not a site-packages does not bring.
    (site,) = (tmp_path / "fresh" / "lib").glob("python*/site-packages")
    (site / "torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    bare = {"PATH": str(python.parent), "PYTHONPATH": None, "CXX": None, "CC": None}
    assert shutil.which("c++", path=bare["PATH"]) is None
    (tmp_path / "train.py").write_text(TRAIN)
    assert f"trained with {site}" in run(python, "train.py", tmp_path, cwd=tmp_path, **bare)
    said = run(python, "-m", "torch_lowcomm", "info", cwd=tmp_path, **bare)
    assert f"built for {torch.__version__.split('+')[0]}" in said
