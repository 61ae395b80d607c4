"""lc.summary(): what ops of all groups have moved, of those that are gone too, as a table and at the end of a process."""

import sys

import pytest
import ranks
import torch
import torch.distributed as dist

import torch_lowcomm as lc

SPEC = "minmax8:bucket=1024"
ELEMENTS = 1 << 18


@pytest.mark.on("quad")
def test_groups_that_are_gone_count_with_the_living(r):
    r.init("lowcomm", pg_options=lc.Options(policy=f"all_gather={SPEC}", min_bytes=0))
    lc.reset_stats()
    assert str(lc.summary()) == "lowcomm: no op has run in this process"
    pairs = [dist.new_group([q, q + 1], backend="lowcomm") for q in (0, 2)]
    mine = pairs[r.rank // 2]
    for group in (None, mine):
        dist.all_gather_into_tensor(
            torch.empty(ELEMENTS * dist.get_world_size(group)), torch.randn(ELEMENTS), group=group
        )
    dist.all_reduce(torch.ones(10), group=mine)
    before = lc.summary()
    of = before.ops["all_gather"]
    assert (of["calls"], of["raw_bytes"]) == (2, 4 * ELEMENTS * (3 + 1))
    assert set(of["wait_by_peer"]) <= {0, 1, 2, 3}
    assert of["straggler"] in {0, 1, 2, 3} - {r.rank}
    dist.destroy_process_group(mine)
    after = lc.summary()
    assert {op: figures["calls"] for op, figures in after.ops.items()} == {"all_gather": 2, "all_reduce": 1}
    assert (after.raw_bytes, after.wire_bytes) == (before.raw_bytes, before.wire_bytes)
    heads, first, second, total = str(after).splitlines()
    assert heads.split()[:2] == ["op", "calls"]
    assert first.split()[:5] == ["all_gather", "2", "0", "4.19", "1.06"] and second.startswith("all_reduce ")
    assert total.startswith("lowcomm: this rank sent 1.06 MB in place of 4.19 MB, 4.0 times fewer; ops took ")
    lc.reset_stats()
    assert not lc.summary().ops


@pytest.mark.on("pair")
def test_why_tensors_were_exact_is_said(r):
    r.init("lowcomm", pg_options=lc.Options(policy="all_reduce=qsgd8", min_bytes=1 << 20))
    lc.reset_stats()
    dist.all_reduce(torch.ones(1000))
    assert any(line.startswith("exact: 1 of all_reduce: ") for line in str(lc.summary()).splitlines())


SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1_000_000))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("asked", ["--summary", "LOWCOMM_SUMMARY", "--summary LOWCOMM_SUMMARY", ""])
def test_rank_0_prints_it_when_its_process_ends(tmp_path, asked):
    (tmp_path / "train.py").write_text(SCRIPT)
    run = ["-m", "torch_lowcomm", "run", *(["--summary"] if "--summary" in asked else []), str(tmp_path / "train.py")]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *run]
    env = {"LOWCOMM_POLICY": "all_reduce=qsgd8", **({"LOWCOMM_SUMMARY": "1"} if "LOWCOMM_SUMMARY" in asked else {})}
    status, out, err = ranks.run_command(launcher, deadline_s=120, cwd=tmp_path, env=env)
    assert status == 0, f"{out}\n{err}"
    assert err.count("lowcomm: this rank sent 1.01 MB in place of 4 MB, 4.0 times fewer") == bool(asked), err
