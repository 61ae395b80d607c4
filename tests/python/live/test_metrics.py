"""LOWCOMM_METRICS and lc.log_to: the same figures as `lc.summary()`, where Prometheus, TensorBoard and W&B read them."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import ranks
import torch
import torch.distributed as dist

import torch_lowcomm as lc
from torch_lowcomm.live import metrics
from torch_lowcomm.live.account import account

ROOT = Path(__file__).parents[3]
SAMPLE = re.compile(r'(\w+)\{((?:\w+="(?:[^"\\\n]|\\["\\n])*",?)*)\} (\S+)')


def parsed(text):
    """The samples of a text: {(name, labels as (name, value)): value}, by prometheus_client's parser where it is there."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, labels, value = SAMPLE.fullmatch(line).groups()
            found[name, frozenset(re.findall(r'(\w+)="([^"]*)"', labels))] = float(value)
    try:
        from prometheus_client.parser import text_string_to_metric_families as families
    except ImportError:
        return found
    theirs = {(s.name, frozenset(s.labels.items())): s.value for family in families(text) for s in family.samples}
    assert theirs == found
    return theirs


def _figure(samples, name, **labels):
    return samples[name, frozenset(labels.items())]


def test_of_a_living_group(r):
    r.init("lowcomm", pg_options=lc.Options(policy="all_reduce=sym4", min_bytes=0))
    lc.reset_stats()
    model = torch.nn.Linear(100, 100)
    optimizer = lc.DiLoCoX(torch.optim.SGD(model.parameters(), lr=0.1), sync_every=1, mode="sync", codec="none")
    model(torch.randn(4, 100)).sum().backward()
    optimizer.step()
    found = {}
    tensorboard = SimpleNamespace(add_scalar=lambda tag, value, step: found.update({tag: (value, step)}))
    run = SimpleNamespace(log=lambda told, step: found.update({tag: (value, step) for tag, value in told.items()}))
    for writer in (tensorboard, run):
        log = lc.log_to(writer)
        log(6)
        before = lc.summary()
        dist.all_reduce(torch.randn(100_000))
        log(7)
        after = lc.summary()
        assert found["lowcomm/exact_mb"] == (pytest.approx((after.raw_bytes - before.raw_bytes) / 1e6), 7)
        assert found["lowcomm/sent_mb"][0] == pytest.approx((after.wire_bytes - before.wire_bytes) / 1e6)
        assert found["lowcomm/error/all_reduce"][0] == after.ops["all_reduce"]["relative_error"]
        assert found["lowcomm/DiLoCoX/outer_steps"] == (1, 7)
    with pytest.raises(TypeError, match="log_to: writer: expected one with add_scalar or log, got builtin"):
        lc.log_to(print)
    samples, rank = parsed(metrics.text(account(), r.rank)), str(r.rank)
    for field, name in (("calls", "calls_total"), ("wire_bytes", "wire_bytes_total"), ("wait_s", "wait_s_total")):
        of = after.ops["all_reduce"][field]
        assert _figure(samples, f"lowcomm_op_{name}", rank=rank, op="all_reduce") == of
    group = {"rank": rank, "group": dist.group.WORLD.group_name}
    assert _figure(samples, "lowcomm_group_ops_under_way", **group) == 0
    assert _figure(samples, "lowcomm_link_connected", **group, peer=str(1 - r.rank)) == 1
    drawn = json.loads((ROOT / "examples" / "grafana.json").read_text())
    used = {name for panel in drawn["panels"] for name in re.findall(r"lowcomm_\w+", panel["targets"][0]["expr"])}
    assert len(used) > 4 and used <= {name for name, _ in samples}


SCRIPT = """
import torch, torch.distributed as dist, torch_lowcomm
dist.init_process_group("lowcomm")
dist.all_reduce(torch.ones(1_000))
dist.destroy_process_group()
"""


def test_each_rank_writes_its_file_at_its_end(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    env = {"LOWCOMM_METRICS": "run.prom"}
    ended = ranks.run_command([*ranks.torchrun(2, "--standalone"), "train.py"], deadline_s=120, cwd=tmp_path, env=env)
    assert ended.code == 0, ended.text
    assert sorted(path.name for path in tmp_path.glob("run*")) == ["run.rank0.prom", "run.rank1.prom"]
    for rank in range(2):
        samples = parsed((tmp_path / f"run.rank{rank}.prom").read_text())
        assert _figure(samples, "lowcomm_op_calls_total", rank=str(rank), op="all_reduce") == 1


@pytest.mark.parametrize(
    ("file", "says"),
    [("run.txt", "expected FILE.prom"), ("nowhere/run.prom", "No such file or directory: make its folder")],
)
def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path, file, says):
    with pytest.raises(ValueError, match=f"^LOWCOMM_METRICS: .*{says}"):
        metrics.begin({"LOWCOMM_METRICS": str(tmp_path / file)}, 0)
