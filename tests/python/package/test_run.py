"""`python -m torch_lowcomm run`: what a script that says "gloo" meets, and what the processes it starts do."""

import sys
from pathlib import Path

import pytest
import ranks
import torch

import torch_lowcomm as lc
from torch_lowcomm._create import without_nccl

RUN = [sys.executable, "-m", "torch_lowcomm", "run"]

_SPAWNS = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp

def train(rank, store):
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
    t = torch.ones(1)
    dist.all_reduce(t)
    kind = type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__
    os.write(1, f"{rank} {dist.get_backend()} {kind} {t.item()}\\n".encode())
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(train, (sys.argv[1],), nprocs=2)
"""


@pytest.mark.later
def test_spawned_ranks_are_on_lowcomm_too(tmp_path):
    script = tmp_path / "spawns.py"
    script.write_text(_SPAWNS)
    code, text, err = ranks.run_command([*RUN, script, tmp_path / "store"], deadline_s=120, cwd=tmp_path)
    assert code == 0, text + err
    said = sorted(line for line in text.splitlines() if " gloo " in line)
    assert said == [f"{rank} gloo LowcommBackend 2.0" for rank in range(2)], text


_LOGS = """
import logging, sys
import torch.distributed as dist

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
logging.basicConfig(level=logging.INFO, format="script: %(message)s")
logging.info("configured")
dist.new_group(backend="gloo")
dist.destroy_process_group()
sys.exit(3)
"""


@pytest.mark.later
def test_a_module_is_run_as_by_python(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(
        "import sys, torch.distributed as dist\n"
        "from . import __name__ as package\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "print(package, type(dist.group.WORLD._get_backend(__import__('torch').device('cpu'))).__name__, sys.argv[1:])\n"
        "dist.destroy_process_group()\n"
    )
    code, text, err = ranks.run_command([*RUN, "-m", "package.train", "--lr", "3", "-m"], deadline_s=120, cwd=tmp_path)
    assert code == 0 and "package LowcommBackend ['--lr', '3', '-m']" in text, text + err
    code, _, err = ranks.run_command([*RUN, "-m", "package.nothing"], deadline_s=120, cwd=tmp_path)
    assert code == 2 and "expected a module's name, found none by 'package.nothing'" in err
    code, _, err = ranks.run_command([*RUN, "package.train"], deadline_s=120, cwd=tmp_path)
    assert code == 2 and "expected a Python script, found none at package.train (-m takes a module)" in err


@pytest.mark.later
def test_the_console_script_and_the_version(tmp_path):
    script = Path(sys.executable).with_name("lowcomm")
    for command in ([script], RUN[:3]):
        code, text, err = ranks.run_command([*command, "--version"], deadline_s=120, cwd=tmp_path)
        assert code == 0 and text.startswith(f"torch_lowcomm {lc.__version__} (torch {torch.__version__}"), text + err
    code, text, _ = ranks.run_command([script, "--help"], deadline_s=120, cwd=tmp_path)
    assert code == 0 and text.startswith("usage: lowcomm ")


def test_logging_and_the_exit_code_are_the_scripts(tmp_path):
    script = tmp_path / "logs.py"
    script.write_text(_LOGS)
    code, _, text = ranks.run_command([*RUN, script, tmp_path / "store"], deadline_s=240, cwd=tmp_path)
    assert code == 3, text
    before, configured, after = text.partition("script: configured\n")
    assert configured, text
    assert before.count("lowcomm group") == before.count("INFO:torch_lowcomm:lowcomm group") == 1, text
    assert after.count("lowcomm group") == after.count("script: lowcomm group") == 1, text


_ASKS = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

store = dist.FileStore(sys.argv[1], 1)
for number, more in enumerate(({}, {"enable_reconfigure": False}, {"hostnames": None}, {"hostnames": ["here"]})):
    try:
        made = c10d.ProcessGroupGloo(dist.PrefixStore(str(number), store), 0, 1, timeout=timedelta(seconds=30), **more)
    except TypeError as error:
        print("gloo itself was asked:", "hostnames" in str(error) or "incompatible" in str(error))
        continue
    print(type(made).__name__)
"""


@pytest.mark.later
def test_what_later_torch_asks_of_gloo_is_passed_on(tmp_path):
    """A keyword that asks for nothing is no reason to refuse; what lowcomm has not is gloo's to do or to refuse."""
    script = tmp_path / "asks.py"
    script.write_text(_ASKS)
    code, text, err = ranks.run_command([*RUN, script, tmp_path / "store"], deadline_s=120, cwd=tmp_path)
    assert code == 0, text + err
    assert text.splitlines() == ["LowcommBackend"] * 3 + ["gloo itself was asked: True"], text
    assert err.count("a group that asks gloo for hostnames=['here'] is gloo's and not lowcomm's") == 1, err


def test_groups_that_outlive_a_peer_do_not_inherit_nccl(monkeypatch):
    assert without_nccl(None).nccl is False
    asked = lc.Options("all_reduce=qsgd8", seed=3)
    assert (without_nccl(asked).nccl, without_nccl(asked).policy, without_nccl(asked).seed) == (False, asked.policy, 3)
    assert without_nccl(lc.Options(nccl=True)).nccl is True
    monkeypatch.setenv("LOWCOMM_NCCL", "1")
    assert without_nccl(None).nccl is None
