"""`torch_lowcomm run` under torchrun and by itself, as a user starts it."""

import sys

import pytest
import ranks

_SCRIPT = """
import os, sys
import torch, torch.distributed as dist
assert __name__ == "__main__"
dist.init_process_group("gloo")
group = dist.group.WORLD
out = torch.empty(dist.get_world_size())
dist.all_gather_into_tensor(out, torch.full((1,), float(dist.get_rank())))
part = dist.new_group(list(range(dist.get_world_size())), backend="gloo")
t = torch.ones(2)
dist.all_reduce(t, group=part)
kinds = [type(g._get_backend(torch.device("cpu"))).__name__ for g in (group, part)]
with open(f"{sys.argv[2]}/said{dist.get_rank()}", "w") as f:
    f.write(f"{dist.get_backend()} {kinds} {out.tolist()} {t.tolist()} {sys.argv[1:2]} {os.path.basename(__file__)}")
dist.barrier()
dist.destroy_process_group()
sys.exit(int(sys.argv[1] == "fail") * 3)
"""


KINDS = ["LowcommBackend", "LowcommBackend"]


@pytest.mark.slow
def test_run_puts_a_gloo_script_on_lowcomm(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = ranks.run_command(
        [*launcher, "-m", "torch_lowcomm", "run", script, "plain", tmp_path], deadline_s=240, cwd=tmp_path
    )
    assert ended.code == 0, ended.text
    for rank in range(2):
        said = (tmp_path / f"said{rank}").read_text()
        assert said == f"gloo {KINDS} [0.0, 1.0] [2.0, 2.0] {['plain']} train.py", said


@pytest.mark.later
def test_run_ends_with_the_scripts_exit_code(tmp_path):
    """One rank without torchrun, which gives no worker's own code."""
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    alone = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    ended = ranks.run_command(
        [sys.executable, "-m", "torch_lowcomm", "run", script, "fail", tmp_path],
        deadline_s=240,
        cwd=tmp_path,
        env=alone,
    )
    assert ended.code == 3, ended.text
    assert (tmp_path / "said0").read_text() == f"gloo {KINDS} [0.0] [1.0, 1.0] {['fail']} train.py"
