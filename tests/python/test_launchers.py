"""torchrun, `torch_lowcomm run` and `info`, as a user starts them."""

import re
import sys

import pytest
import ranks
import torch

_SCRIPT = """
import os, sys
import torch, torch.distributed as dist
assert __name__ == "__main__"
dist.init_process_group("gloo")
group = dist.group.WORLD
out = torch.empty(dist.get_world_size())
dist.all_gather_into_tensor(out, torch.full((1,), float(dist.get_rank())))
part = dist.new_group([0, 1], backend="gloo")
t = torch.ones(2)
dist.all_reduce(t, group=part)
kinds = [type(g._get_backend(torch.device("cpu"))).__name__ for g in (group, part)]
with open(f"{sys.argv[2]}/said{dist.get_rank()}", "w") as f:
    f.write(f"{dist.get_backend()} {kinds} {out.tolist()} {t.tolist()} {sys.argv[1:2]} {os.path.basename(__file__)}")
dist.barrier()
dist.destroy_process_group()
sys.exit(int(sys.argv[1] == "fail") * 3)
"""


@pytest.mark.parametrize("word", ["plain", "fail"])
def test_run_puts_a_gloo_script_on_lowcomm(tmp_path, word):
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = ranks.run_command(
        [*launcher, "-m", "torch_lowcomm", "run", script, word, tmp_path], deadline_s=90, cwd=tmp_path
    )
    assert (ended.code != 0) == (word == "fail"), ended.text
    kinds = ["LowcommBackend", "LowcommBackend"]
    for rank in range(2):
        said = (tmp_path / f"said{rank}").read_text()
        assert said == f"gloo {kinds} [0.0, 1.0] [2.0, 2.0] {[word]} train.py", said


def test_info_runs_a_self_test(tmp_path):
    code, text, err = ranks.run_command([sys.executable, "-m", "torch_lowcomm", "info"], deadline_s=90, cwd=tmp_path)
    assert code == 0, text + err
    assert torch.__version__ in text
    assert re.search("scalar|avx2|avx512", text), text
    assert "gloo" in text


def test_a_second_registration_is_harmless():
    code = "import torch, torch_lowcomm, _torch_lowcomm_autoload as a; a.register(); a.register(); print('fine')"
    ended = ranks.run_command([sys.executable, "-W", "error", "-c", code], deadline_s=60)
    assert ended.out.strip() == "fine", ended.err
