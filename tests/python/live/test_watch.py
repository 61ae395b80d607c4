"""docs/watch.md as it is written: a job that `top` watches; and the program of docs/errors.md for torch's flight recorder."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks
import recipes
import torch
import torch.distributed as dist
from test_metrics import parsed

from torch_lowcomm.groups import backend_of

DOCS = Path(__file__).parents[3] / "docs"
DEADLINE_S = 180.0


def _program(page, name):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    return next(block for block in blocks if name in block)


@pytest.mark.slow
def test_the_page_is_as_it_is_written(tmp_path):
    recipes.needs("tabulate", "requests")
    port, stop = str(ranks.free_port()), tmp_path / "stop"
    program = _program("watch.md", "start_debug_server")
    assert "more.fill_(time.time() < end)" in program
    program = program.replace("time.time() < end", f"not __import__('os').path.exists({str(stop)!r})")
    (tmp_path / "train.py").write_text(program.replace("25999", port))
    start, top, _ = re.findall(r"```sh\n(.*?)\n```", (DOCS / "watch.md").read_text(), re.DOTALL)
    assert start == "LOWCOMM_METRICS=run.prom torchrun --standalone --nproc-per-node 2 train.py"
    launcher = [*ranks.torchrun(2, "--standalone"), "train.py"]
    env = ranks.starters.environment({"LOWCOMM_METRICS": "run.prom"})
    words = [sys.executable, *top.replace("25999", port).split()[1:]]
    with (tmp_path / "out").open("w") as out:
        job = subprocess.Popen(launcher, cwd=tmp_path, env=env, stdout=out, stderr=out)
        try:
            end = time.monotonic() + DEADLINE_S
            while not re.search(r"for rank 1, which is computing", shown := _shown(words)):
                assert time.monotonic() < end and job.poll() is None, f"{shown}\n{(tmp_path / 'out').read_text()}"
            stop.touch()
            assert job.wait(DEADLINE_S) == 0, (tmp_path / "out").read_text()
        finally:
            job.terminate()
            job.wait(DEADLINE_S)
    page = re.search(r"```text\n(lowcomm at .*?)```", (DOCS / "watch.md").read_text(), re.DOTALL)[1]
    for text in (shown, page):
        first, heads, *rows = text.splitlines()
        assert first.endswith(": 2 of 2 ranks answer") and heads.split()[:3] == ["rank", "host", "now"]
        assert [row.split()[0] for row in rows[:2]] == ["0", "1"] and rows[-1].split()[-2:] == ["direct", "-"]
    for rank in range(2):
        samples = parsed((tmp_path / f"run.rank{rank}.prom").read_text()).items()
        assert any(name == "lowcomm_op_wire_bytes_total" and value > 0 for (name, _), value in samples)


def _shown(words):
    """What `top` prints, or why it prints nothing."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S)
    return done.stdout or done.stderr


def _given_up(r):
    r.init("lowcomm")
    x = torch.ones(1000)
    dist.all_reduce(x)
    dist.all_gather_into_tensor(torch.empty(2000), x)
    dist.reduce_scatter_tensor(torch.empty(500), x)
    dist.barrier()
    backend_of().abort()


def test_torchs_flight_recorder_reads_what_a_lost_group_has_left(tmp_path):
    recipes.needs("tabulate")
    from torch.distributed.flight_recorder.components import builder, config_manager, loader

    ranks.run_ranks(_given_up, 2, env={"LOWCOMM_FLIGHT_DIR": str(tmp_path)})
    (tmp_path / "flight.py").write_text(_program("errors.md", "lowcomm-flight"))
    done = subprocess.run(
        [sys.executable, tmp_path / "flight.py", tmp_path], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    arguments = config_manager.JobConfig().parse_args([str(tmp_path), "--prefix", "rank_"])
    details, version = loader.read_dir(arguments)
    found = builder.build_db(details, arguments, version)
    assert [one.collective_name for one in found.collectives] == [
        "nccl:all_reduce", "nccl:all_gather", "nccl:reduce_scatter", "nccl:barrier"
    ]  # fmt: skip
    assert all(one.pass_check and one.collective_state == "completed" for one in found.collectives)
    assert len(found.ncclcalls) == 8
